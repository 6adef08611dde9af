from __future__ import annotations

from adaflash_hf.commands.checkpoint_options import BlockLayout, ReadFormat, hub_arguments, open_target, read_options
from adaflash_hf.commands.convert import ConvertFormat
from adaflash_hf.commands.export import ExportFormat
from adaflash_hf.configuration_dflash_drafter import BLOCK_LAYOUTS
from adaflash_hf.serving.formats import READABLE_FORMATS, WRITABLE_FORMATS


def test_choices_are_those_of_the_library():
    assert {choice.value for choice in ReadFormat} == set(READABLE_FORMATS)
    assert {choice.value for choice in ConvertFormat} == set(WRITABLE_FORMATS)
    assert {choice.value for choice in ExportFormat} <= set(WRITABLE_FORMATS)
    assert {choice.value for choice in BlockLayout} == set(BLOCK_LAYOUTS)


def test_options():
    assert open_target(None) is None
    target = open_target("org/target")
    options = read_options(target, 8, BlockLayout.ANCHOR_FIRST, True)
    assert (options.target, options.block_size, options.block_layout, options.trust_copies) == (
        target,
        8,
        "anchor_first",
        True,
    )
    assert read_options(None, None, None, False).block_layout is None
    assert hub_arguments(None) == {} and hub_arguments("v2") == {"revision": "v2"}
