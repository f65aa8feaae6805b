import torch
from treeattn.bench.inputs import Inputs
from treeattn.bench.providers import tree_calls
from treeattn.bench.workloads import Workload
inputs = Inputs(Workload("pages", 8, 65, 8192, page_size=1), torch.device("cuda"), 0)
calls = tree_calls(inputs, "cuda").calls
for _ in range(4): calls[0]()
torch.cuda.synchronize()
