"""Runs the tests' Python programs in forks of one interpreter, which imports PyTorch, transformers and PEFT once.

    python server.py SOCKET      (as long as its parent runs)

A request is {"args": those of an interpreter, "cwd", "env"}, the answer {"exitCode", "stdout", "stderr"}, both JSON over HTTP.
"""
import contextlib
import http.server
import json
import os
import runpy
import socketserver
import sys
import tempfile
import traceback
import warnings


def imported():
    """Packages whose import takes seconds; what is loaded lazily, such as the classes of a model, each fork loads."""
    # A program that needs an absent package says so itself.
    with contextlib.suppress(ImportError):
        import peft, torchvision, transformers  # noqa: F401, E401
        from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor  # noqa: F401


def run(args):
    """As `python [-W FILTER] FILE|-c TEXT ARGUMENTS...`."""
    if args[0] == "-W":
        warnings.simplefilter(args[1])
        args = args[2:]
    if args[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *args[2:]], ""
        exec(compile(args[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = args, os.path.dirname(os.path.abspath(args[0]))
        runpy.run_path(args[0], run_name="__main__")


def exit_code(args):
    try:
        run(args)
        return 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1


class Handler(http.server.BaseHTTPRequestHandler):
    """In a process of its own, as ForkingMixIn has it."""

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            os.dup2(out.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            code = exit_code(request["args"])
            sys.stdout.flush()
            sys.stderr.flush()
            texts = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in (out, errors)]
        answer = json.dumps({"exitCode": code, "stdout": texts[0], "stderr": texts[1]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


class Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    def process_request(self, request, address):
        imported()
        super().process_request(request, address)

    def service_actions(self):
        super().service_actions()
        if os.getppid() != parent:
            sys.exit()


parent = os.getppid()
with Server(sys.argv[1], Handler) as server:
    server.serve_forever()
