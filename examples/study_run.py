"""One run of the study, which starts it: one optimizer, one worker per process.

With --share N it trains on the first N-th of every batch: what one of N workers computes,
without the others and so without waiting for them.
"""

import dataclasses

import cnn
import comparison
import jax
import ngram_lm

#: Evaluations in a run, to tell when it reached a loss. They are not timed.
EVALUATIONS = {"ngram_lm": 40, "cnn": 10}

if __name__ == "__main__":
    parser = cnn.parser()
    parser.add_argument("--task", choices=EVALUATIONS, required=True)
    parser.add_argument("--share", type=int, default=1)
    args = parser.parse_args()
    mesh = comparison.start(args)
    task = ngram_lm.make_task() if args.task == "ngram_lm" else cnn.make_task(args.data)
    whole = task.batch
    share = lambda batch: jax.tree.map(lambda x: x[: len(x) // args.share], batch)
    task = dataclasses.replace(
        task, batch=lambda seed, step: share(whole(seed, step)),
        evaluations=EVALUATIONS[args.task] if args.share == 1 else 1,
    )
    comparison.compare(task, args, mesh, args.task)
