"""Random cases beside independent oracles; nothing may differ, and nothing may crash.

    python -m tests.fuzz --minutes 30 --seed 1

A target (`targets.TARGETS`) makes one case from a seed and a number, and nothing else, so that each can be repeated
alone. `make test` runs some cases of every target (`test_fuzz`), `make fuzz` as many as its minutes allow.
"""
