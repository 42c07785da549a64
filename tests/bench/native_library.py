"""Calls of a native library's operations from Python, on PyTorch's tensors."""

import ctypes
import pathlib
import re

own_header = pathlib.Path(__file__).parents[2] / "cuda/include/mimo.h"
types = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float}


def header_text(path):
    """A header with those that it includes from its folder: mimo.h of any version."""
    folder = pathlib.Path(path).parent
    text = pathlib.Path(path).read_text()
    return text + "".join((folder / name).read_text() for name in re.findall(r'^#include "(mimo/.*)"', text, re.M))


def struct_of(operation, header):
    """The arguments of an operation, as the text of the headers declares them."""
    body = re.search(r"typedef struct mimo_%s_args \{(.*?)\}" % operation, header, re.S)[1]
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
    fields = []
    for kind, names in re.findall(r"(?:const )?(\w+)((?:\s*\*?\s*\w+,?)+);", body):
        for name in names.split(","):
            fields.append((name.replace("*", "").strip(), ctypes.c_void_p if "*" in names else types[kind]))
    return type(operation, (ctypes.Structure,), {"_fields_": fields})


class Library:
    def __init__(self, path, header):
        self.header = header_text(header)
        self.code = ctypes.CDLL(path)
        self.code.mimo_last_error.restype = ctypes.c_char_p
        device, self.stream = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.code.mimo_device_open(0, 0, ctypes.byref(device)))
        self.check(self.code.mimo_stream_create(device, 0, ctypes.byref(self.stream)))
        self.structs = {}

    def check(self, status):
        if status != 0:
            raise SystemExit(self.code.mimo_last_error().decode())

    def call(self, operation, **values):
        """What queues the operation with these arguments."""
        if operation not in self.structs:
            self.structs[operation] = struct_of(operation, self.header)
        arguments = self.structs[operation]()
        names = {name for name, _ in arguments._fields_}
        for name, value in values.items():
            if name not in names:
                raise SystemExit(f"{operation} has no argument {name}.")
            setattr(arguments, name, value.data_ptr() if hasattr(value, "data_ptr") else value)
        function, pointer = getattr(self.code, f"mimo_{operation}"), ctypes.byref(arguments)
        return lambda: self.check(function(self.stream, pointer)), (arguments, values)
