"""Computes and draws the pictures of the documentation: docs/pictures/*.svg.

    python docs/pictures.py

The same versions of jax and matplotlib draw the same files. Colours follow the reader's
light or dark mode.
"""

import pathlib

import jax
import matplotlib
import numpy as np
import optax

import onebit_jax

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

FOLDER = pathlib.Path(__file__).parent / "pictures"

#: Colours to draw with, and what they become in light and in dark mode.
INK, FAINT, GROUND, BLUE, ORANGE = "#000001", "#000002", "#000003", "#000004", "#000005"
MODES = {
    "light": {INK: "#24292f", FAINT: "#8c959f", GROUND: "#ffffff", BLUE: "#0969da",
              ORANGE: "#bc4c00"},
    "dark": {INK: "#e2e4e9", FAINT: "#7d8590", GROUND: "#1e2129", BLUE: "#6cb6ff",
             ORANGE: "#f69d50"},
}
STYLE = {
    "svg.hashsalt": "onebit_jax", "svg.fonttype": "path", "font.size": 10,
    "figure.facecolor": GROUND, "axes.facecolor": GROUND, "savefig.facecolor": GROUND,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": FAINT, "xtick.color": INK,
    "ytick.color": INK, "legend.frameon": False, "axes.spines.top": False,
    "axes.spines.right": False, "lines.linewidth": 1.5, "figure.constrained_layout.use": True,
}


def save(figure, name):
    path = FOLDER / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    text = path.read_text()
    rules = {mode: "".join(f"--c{key[-1]}:{value};" for key, value in colours.items())
             for mode, colours in MODES.items()}
    style = (f"<style>:root{{{rules['light']}}}@media(prefers-color-scheme:dark)"
             f"{{:root{{{rules['dark']}}}}}</style>")
    for key in MODES["light"]:
        text = text.replace(key, f"var(--c{key[-1]})")
    head, defs, rest = text.partition(" <defs>")
    lines = (head + style + defs + rest).splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n")


def cells(axes, x, y, colours, labels):
    for i, (colour, label) in enumerate(zip(colours, labels, strict=True)):
        marked = colour != FAINT
        axes.add_patch(plt.Rectangle((x + i, y), 0.92, 0.7, facecolor=colour, edgecolor=colour,
                                     alpha=0.35 if marked else 0.12))
        axes.text(x + i + 0.46, y + 0.33, label, ha="center", va="center", fontsize=9)


def arrow(axes, start, end, colour=ORANGE):
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.1,
                                              "shrinkA": 0, "shrinkB": 0})


def exchange():
    """Both phases between four workers, with chunk 3 marked, and the one between two."""
    figure, axes = plt.subplots(figsize=(9.4, 5.2))
    axes.axis("off")
    left, middle, right, marked = 1.6, 8.2, 14.8, 3
    row = lambda worker: 7 - worker
    chunk_colours = [ORANGE if chunk == marked else FAINT for chunk in range(4)]
    for worker in range(4):
        y, mine = row(worker), worker == marked
        axes.text(0, y + 0.33, f"worker {worker}", va="center")
        cells(axes, left, y, chunk_colours, list("0123"))
        cells(axes, middle, y, [ORANGE if mine else FAINT] * 4, [f"of {w}" for w in range(4)])
        cells(axes, right, y, chunk_colours, list("0123"))
        arrow(axes, (left + 4.0, y + 0.35), (middle - 0.1, row(marked) + 0.35))
        arrow(axes, (middle + 4.0, row(marked) + 0.35), (right - 0.1, y + 0.35))
    for x, text in (
        (left, "chunks 0 to 3, quantized by each\nworker, which keeps its error"),
        (middle, "worker r serves chunk r: its mean,\nquantized with a server error"),
        (right, "all chunks, decoded by all:\nthe same bits everywhere"),
    ):
        axes.text(x + 2, 8.2, text, ha="center", va="bottom")
    axes.text(left + 5.3, 3.55, "all_to_all", ha="center", color=ORANGE)
    axes.text(middle + 5.3, 3.55, "all_gather", ha="center", color=ORANGE)
    for worker in range(2):
        y = 1.6 - worker
        axes.text(0, y + 0.33, f"worker {worker}", va="center")
        cells(axes, left, y, [BLUE] * 4, ["bits"] * 4)
        cells(axes, middle, y, [BLUE] * 2, ["of 0", "of 1"])
        axes.text(middle + 2.2, y + 0.33, "both take the mean of the two", va="center")
        for target in range(2):
            arrow(axes, (left + 4.0, y + 0.35), (middle - 0.1, 1.95 - target), BLUE)
    axes.text(left + 5.3, 0.15, "all_gather", ha="center", color=BLUE)
    axes.text(0, 2.6, "Two workers need no server:", va="center")
    axes.set(xlim=(-0.2, 19.2), ylim=(0.0, 9.3))
    save(figure, "exchange")


def error_feedback(rounds=60, entry=3):
    """One entry of a block of 512 that are the same in each round, as it is sent."""
    values = np.random.default_rng(1).normal(size=512).astype(np.float32)
    values[entry] = 0.3
    quantizer = onebit_jax.SignQuantizer()

    @jax.jit
    def one_round(error, _):
        total = values + error
        sent = quantizer.decode(*quantizer.encode(total), 512)
        return total - sent, (sent[entry], (total - sent)[entry])

    _, (sent, error) = jax.lax.scan(one_round, np.zeros(512, np.float32), length=rounds)
    alone = quantizer.decode(*quantizer.encode(values), 512)[entry]
    steps = np.arange(1, rounds + 1)
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(7.4, 4.6), sharex=True, height_ratios=(2, 1)
    )
    top.axhline(values[entry], color=INK, lw=1, ls="--", label="the entry, 0.3")
    top.plot(steps, np.full(rounds, alone), color=FAINT, label="mean of what is sent without")
    top.plot(steps, np.cumsum(sent) / steps, color=ORANGE, label="mean of what is sent with")
    top.plot(steps, sent, ".", color=BLUE, label="sent: sign times scale")
    top.set(ylabel="value")
    top.legend(loc="center right", bbox_to_anchor=(1, 0.3), fontsize=9)
    bottom.step(steps, error, color=BLUE, where="mid")
    bottom.axhline(0, color=FAINT, lw=0.8)
    bottom.set(ylabel="error kept", xlabel="round")
    save(figure, "error_feedback")


def rounds(steps=2000):
    """Which rounds of the default policy are exact, and what is sent in the end."""
    policy = onebit_jax.refresh()
    signals = onebit_jax.Signals(norm=lambda: np.float32(0), cut=np.bool_(False))

    def step(state, i):
        decision, state = policy.update(state, i, signals)
        return state, decision.exact

    _, exact = jax.lax.scan(step, policy.init(0.999), np.arange(steps, dtype=np.int32))
    exact = np.asarray(exact)
    at = np.arange(steps)
    age = at - np.maximum.accumulate(np.where(exact, at, -1))
    sent = np.cumsum(np.where(exact, 4.0, (1 + 32 / 512) / 8))
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7.4, 4.2), sharex=True)
    top.plot(at, age, color=BLUE)
    top.set(ylabel="steps since the\nlast exact round")
    bottom.plot(at, 4.0 * (at + 1), color=FAINT, label="all rounds exact")
    bottom.plot(at, sent, color=ORANGE, label=f"{exact.sum()} of {steps} exact")
    bottom.set(ylabel="bytes per parameter", xlabel="step", ylim=(0, 4.0 * steps))
    bottom.legend(loc="upper left", fontsize=9)
    save(figure, "rounds")


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(np.asarray(x))) for x in jax.tree.leaves(tree)))


def switch(steps=400, exact_steps=100):
    """A small network on four workers: loss and worker error around the switch."""
    mesh = jax.make_mesh((4,), ("data",))
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    start = {"w1": draw(16, 64) / 4, "w2": draw(64, 1) / 8}
    hidden = draw(16, 1) / 4
    batches = [(x, np.sin(x @ hidden)) for x in (draw(64, 16) for _ in range(steps))]

    def loss_fn(params, batch):
        guess = jax.numpy.tanh(batch[0] @ params["w1"]) @ params["w2"]
        return jax.numpy.mean((guess - batch[1]) ** 2)

    def train(tx):
        with jax.set_mesh(mesh):
            state = (start, tx.init(start))
        train_step = onebit_jax.make_train_step(loss_fn, tx, mesh)
        losses, errors = [], []
        for batch in batches:
            state, metrics = train_step(state, batch)
            losses.append(float(metrics["loss"]))
            if isinstance(state[1][0], onebit_jax.ScaleByOnebitAdamState):
                held = state[1][0]
                errors.append(norm(held.errors.worker_error) / 2 / norm(held.mu))  # of 4 workers
        return np.asarray(losses), errors

    adam, _ = train(optax.chain(onebit_jax.exact_mean("data"), optax.adam(1e-2)))
    policy = onebit_jax.refresh(exact_steps=exact_steps)
    onebit, errors = train(onebit_jax.onebit_adam(1e-2, "data", variance=policy))
    smooth = lambda x: np.convolve(x, np.ones(10) / 10, mode="valid")
    at = np.arange(10, steps + 1)
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7.4, 4.6), sharex=True)
    top.semilogy(at, smooth(adam), color=FAINT, lw=3, label="Adam")
    top.semilogy(at, smooth(onebit), color=ORANGE, label="1-bit Adam")
    top.set(ylabel="loss, mean of 10 steps")
    top.legend(fontsize=9)
    bottom.plot(np.arange(1, steps + 1), errors, color=BLUE)
    bottom.set(ylabel="worker error /\nmomentum", xlabel="step", ylim=(0, None))
    for axes in (top, bottom):
        axes.axvline(exact_steps, color=INK, lw=0.8, ls="--")
    top.text(exact_steps + 4, adam[:10].mean(), "the first 1-bit round", va="top", fontsize=9)
    save(figure, "switch")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    FOLDER.mkdir(exist_ok=True)
    with plt.rc_context(STYLE):
        exchange()
        error_feedback()
        rounds()
        switch()
