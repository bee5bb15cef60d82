"""A restart of the ranks under torchrun, whose store keeps the keys of the ended ranks."""

from tests import warm

PROGRAM = """
import os, signal, sys, time
from shardcore.adapters.ranks.job import exchange, process_group
from shardcore.domain.ranks.job import resolve_job

rank, first = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if rank == 1 and not first:
    time.sleep(1)  # rank 0 finds the addresses of the ended ranks alone
ours = process_group.start(resolve_job(environ=os.environ), timeout=20)
exchange.share_secret()
exchange.gather(rank)
if first and rank == 1:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
if first:
    exchange.gather("of the first start")  # rank 0 alone: it counts one more than rank 1
line = f"gathered {exchange.gather(f'{rank} of the second')}\\n"
os.write(1, line.encode())  # in one call, so that the ranks' lines do not mix
process_group.stop(ours)
"""


def test_the_ranks_of_a_restart_meet_each_other_and_no_ended_rank(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = ["--standalone", "--nproc_per_node=2", "--max-restarts=1", program]
    run = warm.run_torchrun(words)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("gathered ['0 of the second', '1 of the second']") == 2, run.stderr
