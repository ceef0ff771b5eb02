"""Our own modules as processes: found from any packaging, with an interpreter that knows nothing of us."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from llmgw.agent import own_modules
from llmgw.agent.gpus import READER_MODULE


def unpacked(folder: Path) -> Path:
    """A folder with llmgw and a stand-in for NVML, as the packages lay them side by side. Returns the file that starts modules."""
    package = folder / "llmgw" / "agent"
    package.mkdir(parents=True)
    source = Path(own_modules.__file__).parent
    for name in ("own_modules.py", "gpu_reader.py"):
        (package / name).write_text((source / name).read_text())
    for one in (package, package.parent):
        (one / "__init__.py").write_text("")
    (folder / "pynvml.py").write_text(
        "class NVMLError(Exception): pass\n"
        "class NVMLError_LibraryNotFound(NVMLError): pass\n"
        "class NVMLError_DriverNotLoaded(NVMLError): pass\n"
        "def nvmlInit(): raise NVMLError_LibraryNotFound('no library')\n"
    )
    return package / "own_modules.py"


def test_a_module_runs_with_an_interpreter_that_does_not_know_our_folder(tmp_path: Path) -> None:
    script = unpacked(tmp_path)
    python, *words, _, module = own_modules.command_line(READER_MODULE, sys.executable)
    # -I -S: no installed packages at all, as under a system's interpreter that has none of ours
    command = [python, "-I", "-S", *words, str(script), module]
    done = subprocess.run(command, input="?\n", capture_output=True, text=True, timeout=60, check=False, cwd="/")
    assert (done.stderr, json.loads(done.stdout)) == ("", {"absent": "no library"})


def test_the_command_line_names_a_file_that_is_there_and_the_module() -> None:
    python, option, script, module = own_modules.command_line(READER_MODULE)
    assert (python, option, module) == (sys.executable, "-P", READER_MODULE)
    assert Path(script).is_file()


def test_arguments_reach_the_module_and_its_name_stands_before_them(tmp_path: Path) -> None:
    script = unpacked(tmp_path)
    (script.parent / "shown.py").write_text(
        "import json, sys\nprint(json.dumps([__name__, sys.argv[0], sys.argv[1:], sys.orig_argv[1:]]))\n"
    )
    words = ["-P", str(script), "llmgw.agent.shown", "--ctx-size", "12"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=True, cwd="/")
    name, program, arguments, original = json.loads(done.stdout)
    assert (name, program, arguments) == ("__main__", str(script.parent / "shown.py"), ["--ctx-size", "12"])
    assert original == words, "a process that starts itself anew needs the words it was started with"


def test_our_folder_comes_after_the_standard_library_and_before_what_else_is_installed() -> None:
    path = ["/usr/lib/python311.zip", "/usr/lib/python3.11", "/usr/local/lib/python3.11/dist-packages", "/usr/lib/python3/dist-packages"]
    assert own_modules.with_folder(path, "/usr/lib/llmgw") == [*path[:2], "/usr/lib/llmgw", *path[2:]]
    assert own_modules.with_folder(path[:2], "/usr/lib/llmgw") == [*path[:2], "/usr/lib/llmgw"]


def test_a_folder_that_is_known_keeps_its_place() -> None:
    path = ["/usr/lib/python3.11", "/venv/lib/python3.11/site-packages", "/checkout"]
    assert own_modules.with_folder(path, "/checkout") == path
