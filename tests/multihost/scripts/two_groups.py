"""A plain script: an all-reduce in the default group and in a new one."""

from __future__ import annotations

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
dist.all_reduce(value, group=dist.new_group())
print(f"sum {value.item():g} of {dist.get_world_size()}", flush=True)
dist.destroy_process_group()
