"""`engine linears`: measures the fastest matrix product for each linear layer of a model, as a table or as JSON."""

from __future__ import annotations

from collections import Counter
from typing import Any

from engine.cli import options, output
from engine.cli.libraries import start_libraries
from engine.cli.progress import Work
from engine.tables import Column, fitted, terminal_width, wrapped


@options.takes({None: options.LINEARS})
def linears(path: str | None, threads: int | None, as_json: bool) -> None:
    """Measure which matrix products are the fastest for a model's linear layers, for later calls (without weights)."""
    with Work() as work:
        start_libraries(work, path)
        import torch
        from torch import nn

        from engine.kernels import linear_measurement, linear_routes
        from engine.loading.load import SHIPPED_MODEL, load_config
        from engine.memory.model_footprint import meta_model

        work.doing("reading the model's configuration")
        modules = meta_model(load_config(SHIPPED_MODEL if path is None else path)).modules()
        layers = Counter(linear_routes.shape_of(module.weight) for module in modules if isinstance(module, nn.Linear))
        if threads is not None:
            torch.set_num_threads(threads)
        work.doing("measuring matrix products")
        measured = linear_measurement.fastest(layers)
        by_shape = linear_routes.names_for(layers, measured)
    report = {
        "threads": torch.get_num_threads(),
        "measured": set(filter(linear_routes.is_large, layers)) <= measured.keys(),
        "shapes": [
            {"outputs": shape[0], "inputs": shape[1], "layers": layers[shape],
             "fastest": dict(zip(linear_routes.ROW_NAMES, by_shape[shape], strict=True))}
            for shape in sorted(layers)
        ],
    }  # fmt: skip
    output.say_json(report) if as_json else output.say(_as_text(report, terminal_width(100)))


def _as_text(report: dict[str, Any], width: int) -> str:
    shapes = report["shapes"]
    if not shapes:
        return "This model has no linear layers of torch."
    columns = [Column(title) for title in ("outputs x inputs", "layers", *shapes[0]["fastest"])]
    rows = [
        [f"{shape['outputs']} x {shape['inputs']}", str(shape["layers"]), *shape["fastest"].values()]
        for shape in shapes
    ]
    closing = (
        f"The fastest product by rows (tokens of all sequences in a step), float32, {report['threads']} threads. "
        '"torch" is its own, "kernel" this package\'s; another than torch\'s is used where it is faster by a tenth. '
        "Later calls on this machine use these for float32 weights."
    )
    if not report["measured"]:
        closing += (
            " Not all are measured, as other programs use the processors or memory is out: these are what the kind of "
            "processor tells, and a later `engine linears` measures."
        )
    return f"{fitted(columns, rows, width)}\n\n{wrapped(closing, width)}"
