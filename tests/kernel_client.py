"""The beginning of a program that uses a running kernel of Jupyter, named by its connection file."""

CONNECTED = """\
import sys, time
from jupyter_client.blocking import BlockingKernelClient
client = BlockingKernelClient(connection_file=sys.argv[1])
client.load_connection_file()
client.start_channels()
for _ in range(60):
    try:
        client.wait_for_ready(timeout=60)
        break
    except RuntimeError:  # no heartbeat yet: on a slow machine the kernel is still starting
        time.sleep(1)
"""
