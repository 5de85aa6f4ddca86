"""Two copying lanes and a consumer share a ring of stages: a model of their barriers.

A lane waits for `empty[stage]` by the parity of a phase, as BulkLoader does. A phase has the parity
of the phase two before. So a lane that comes too early could take a stage that is in use.
"""

import pathlib
import re
from collections.abc import Iterator

import pytest

from jax_fp8gemm._runtime import environment

NUM_TILES = 6
State = tuple[int, int, int]  # k-blocks that each lane has started, and that were given back


def _least_stages() -> int:
    """The least stages with which cuda/gemm/tile.cuh gives a kernel two lanes."""
    text = (pathlib.Path(environment.source_dir()) / "gemm" / "tile.cuh").read_text()
    (most,) = re.findall(r"kNumLoaders = kIsShallow && Config::kNumStages > (\d+) \? 2 : 1;", text)
    return int(most) + 1


def _early_starts(num_k_blocks: int, num_stages: int) -> Iterator[tuple[State, int]]:
    """In any order of events: the states in which a lane starts a k-block whose stage is in use."""
    own = [
        [tile * num_k_blocks + j for tile in range(NUM_TILES) for j in range(lane, num_k_blocks, 2)]
        for lane in range(2)
    ]
    seen: set[State] = set()
    states: list[State] = [(0, 0, 0)]
    while states:
        state = states.pop()
        if state in seen:
            continue
        seen.add(state)
        *started, given_back = state
        for lane in range(2):
            if started[lane] == len(own[lane]):
                continue
            k_block = own[lane][started[lane]]
            use, stage = divmod(k_block, num_stages)
            phases = len(range(stage, given_back, num_stages))  # that empty[stage] has completed
            if phases % 2 != use % 2:
                continue  # the lane waits
            if phases < use:
                yield state, k_block
                continue
            after = [*started, given_back]
            after[lane] += 1
            states.append((after[0], after[1], after[2]))
        if any(given_back in own[lane][: started[lane]] for lane in range(2)):
            states.append((started[0], started[1], given_back + 1))


@pytest.mark.parametrize("num_k_blocks", range(1, 8))
def test_no_lane_takes_a_stage_in_use(num_k_blocks):
    least = _least_stages()
    for num_stages in range(least, least + 4):
        assert not list(_early_starts(num_k_blocks, num_stages)), num_stages


def test_fewer_stages_would_not_do():
    assert any(_early_starts(3, _least_stages() - 1))
