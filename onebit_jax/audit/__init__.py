"""What a compiled program sends, read from its text.

Knows HLO and nothing of this library, so that it can bear witness against it.
"""
