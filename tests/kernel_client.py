"""Programs that use kernels of Jupyter."""

# The beginning of a program that uses a running kernel, named by its connection file.
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

# Start a kernel by its name, as Jupyter does, and run a cell in it.
START_KERNEL = """\
import sys
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(startup_timeout=150, kernel_name=sys.argv[1])
client.execute_interactive("import sys, os; print('SAID', sys.prefix, os.environ['HPCENV_RUN'])", timeout=60)
manager.shutdown_kernel()
"""
