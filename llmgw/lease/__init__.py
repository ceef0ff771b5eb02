"""The lease: which process of several on one store may place work (control.md 2.1).

A state machine of pure functions, without clock, I/O or randomness, and the task that runs it. The common way through it:
- `rules`: what protects an invariant, a function each. `state`: what is known, and what the claim is worth at an instant.
- `digest.step(view, event, now_s)` takes in what happened (`events`); `decide.decide(view, now_s, draw)` says what to do next (`actions`).
- A candidate (FOLLOW) reads every `poll_s`. What an answer shows may be a `Chance`: the lease may be taken from exactly that
  record. The chance becomes a write (ACQUIRING); an answer that gives none takes the chance away again.
- A write is an `Attempt`. Without an answer it is in `doubt` until the record is read: its write id there means it had succeeded.
- Who won is WARMING: epoch to disk (StoreEpoch), then the hooks (StartWork, Warmed), then LEADING; renewed from the first moment.
- LEADING is CONFIRMED until `valid_until_s` and UNCONFIRMED after it; no event is needed for that.
- Whoever lets go (STEPPING_DOWN) ends the work, then releases; who is deposed (FENCED) ends the work, then draws a new owner id.
- `keeper` carries that out against a `store`: `file` on one machine, `object_store` in a bucket, `sole` where nobody else can compete.
"""
