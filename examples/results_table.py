"""Prints a Markdown table of results written with --json, one row per optimizer and run.

    python examples/results_table.py out/lm-0.json out/lm-1.json ...

Runs of several seeds get a row with their means as well.
"""

import json
import pathlib
import sys


def rows(paths: list[str]) -> list[list[str]]:
    runs = [r for path in paths for r in json.loads(pathlib.Path(path).read_text())["runs"]]
    scored = "accuracy" in runs[0]
    head = ["optimizer", "seed", "held-out loss", *(["accuracy"] if scored else []),
            "exact rounds", "1-bit rounds", "MB sent per worker", "ratio"]
    first = next(r for r in runs if r["optimizer"] == runs[0]["optimizer"])

    def row(name: str, seed: str, group: list[dict]) -> list[str]:
        mean = lambda key: sum(r[key] for r in group) / len(group)
        accuracy = [f"{100 * mean('accuracy'):.2f} %"] if scored else []
        ratio = first["bytes_sent"] / mean("bytes_sent") if mean("bytes_sent") else 1
        return [name, seed, f"{mean('eval_loss'):.4f}", *accuracy, f"{mean('exact_rounds'):.0f}",
                f"{mean('onebit_rounds'):.0f}", f"{mean('bytes_sent') / 1e6:.0f}", f"{ratio:.1f}x"]

    table = [head, ["---"] * len(head)]
    names = list(dict.fromkeys(r["optimizer"] for r in runs))
    for name in names:
        group = [r for r in runs if r["optimizer"] == name]
        table += [row(name, str(r["seed"]), [r]) for r in group]
    for name in names:
        group = [r for r in runs if r["optimizer"] == name]
        if len(group) > 1:
            table.append(row(name, "mean", group))
    return table


def markdown(table: list[list[str]]) -> str:
    """Rows of cells, the second of which is the rule under the first."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in table)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    print(markdown(rows(sys.argv[1:])))
