import argparse, json, os, sys
p = argparse.ArgumentParser(); p.add_argument("--lr", type=float, default=0.1); p.add_argument("--steps", type=int, default=30); p.add_argument("--accumulate", type=int, default=1)
a = p.parse_args()
import torch, torch.distributed as dist
dist.init_process_group("gloo")
r, w = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
m = torch.nn.Linear(16, 1); o = torch.optim.SGD(m.parameters(), lr=a.lr)
out = open("metrics.jsonl", "w") if r == 0 else None
for step in range(1, a.steps + 1):
    o.zero_grad(); total = 0.0
    for k in range(a.accumulate):
        g = torch.Generator().manual_seed(step * 1000 + r * a.accumulate + k)
        x = torch.randn(8, 16, generator=g)
        loss = ((m(x) - x.sum(1, keepdim=True)) ** 2).mean() / a.accumulate
        loss.backward(); total += loss.detach()
    for q in m.parameters():
        dist.all_reduce(q.grad); q.grad /= w
    dist.all_reduce(total); o.step()
    if out: out.write(json.dumps({"step": step, "loss": total.item() / w}) + "\n")
if out: out.close()
dist.destroy_process_group()
