"""deepspeed.runtime.pipe: what describes a pipeline. There is no engine of pipelines."""

from libzero.deepspeed._refuse import module_getattr
from libzero.deepspeed.runtime.pipe import module, schedule, topology
from libzero.deepspeed.runtime.pipe.module import LayerSpec, TiedLayerSpec
from libzero.deepspeed.runtime.pipe.topology import ProcessTopology

__all__ = ["LayerSpec", "ProcessTopology", "TiedLayerSpec", "module", "schedule", "topology"]

__getattr__ = module_getattr("deepspeed.runtime.pipe")
