"""Tile configs in short text, and cases that run a given one: for tuning."""

import dataclasses
import re
from collections.abc import Iterator, Sequence

import jax

from benchmarks.case import Case, tile_text
from benchmarks.timing.timer import Call
from jax_fp8gemm._tuning import choose, tile_config
from jax_fp8gemm._tuning.tile import TileConfig

_PATTERN = re.compile(r"(\d+)x(\d+)/(\d+) w(\d+) a(\d+) s(\d+) d(\d+) c(\d+)x(\d+)(?:x(\d+))?")


def parse_tile(text: str) -> TileConfig:
    """The config that the table prints as `text`, whether or not the heuristic would pick it."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        example = tile_text(tile_config.CONFIGS[0])
        raise ValueError(f"bench: --tile must look like '{example}' or be 'all'; got '{text}'")
    return TileConfig(*map(int, match.groups(default="1")))


def with_tiles(cases: Sequence[Case], texts: Sequence[str]) -> Iterator[Case]:
    """Each case once for each config of `texts`; "all" stands for its `tiles`."""
    for case in cases:
        for text in texts:
            tiles = case.tiles if text == "all" else (parse_tile(text),)
            yield from (_with_tile(case, tile) for tile in tiles)


def with_regret(cases: Sequence[Case]) -> list[Case]:
    """Each case with every tile config in the place of its peers, to see what the choice costs."""
    return [
        dataclasses.replace(
            case, peers={tile_text(tile): _with_tile(case, tile).build for tile in case.tiles}
        )
        for case in cases
    ]


def _with_tile(case: Case, tile: TileConfig) -> Case:
    def build() -> Call:
        with choose.override(tile):
            call = case.build()
            # Lowers while the override holds; the second time for the results that an accumulating
            # product is then given as operands.
            for _ in range(2):
                jax.block_until_ready(call.run())
        return call

    return dataclasses.replace(case, config=tile_text(tile), build=build)
