"""The 1-bit mean: signs in words, quantizer, error feedback, and the exchange itself.

Pure array code and collectives; knows nothing of optimizers or of training.
"""
