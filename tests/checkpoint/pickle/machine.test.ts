import { describe, expect, test } from "bun:test";
import { metadataGlobals, stateGlobals, tensorGlobals } from "../../../src/checkpoint/pickle/allowed.ts";
import { unpickle } from "../../../src/checkpoint/pickle/machine.ts";
import { PythonObject, TorchDtype, Tuple } from "../../../src/checkpoint/pickle/values.ts";
import { UserError } from "../../../src/system/errors.ts";

/** Pickle bytes from text (latin1) and numbers. */
function bytes(...parts: (string | number | Uint8Array)[]): Uint8Array {
	return new Uint8Array(
		Buffer.concat(
			parts.map((part) => (typeof part === "number" ? Buffer.of(part) : Buffer.from(part as string, "latin1"))),
		),
	);
}

/** BINUNICODE. */
function text(value: string): Uint8Array {
	const encoded = Buffer.from(value);
	const length = Buffer.alloc(4);
	length.writeUInt32LE(encoded.length);
	return bytes("X", length, encoded);
}

const global = (module: string, name: string) => `c${module}\n${name}\n`;
const load = (...parts: (string | number | Uint8Array)[]) =>
	unpickle(bytes(...parts), "file", { allowed: stateGlobals(["mine Thing"]) });

describe("plain values", () => {
	const cases: [string, (string | number | Uint8Array)[], unknown][] = [
		["None", ["N."], null],
		["booleans", ["\x88\x89\x86."], new Tuple([true, false])],
		["small integers", ["(K\xffM\xff\xffJ\xff\xff\xff\xfft."], new Tuple([255, 65535, -1])],
		["long integers", ["\x8a\x05\x00\x00\x00\x00\x01."], 2 ** 32],
		["negative long", ["\x8a\x01\x80."], -128],
		["zero long", ["\x8a\x00."], 0],
		["integers beyond 2^53", ["\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f."], 2n ** 63n - 1n],
		["floats", ["G\x3f\xf8\x00\x00\x00\x00\x00\x00."], 1.5],
		["text", [text("ü"), "."], "ü"],
		["Python 2 text", ["U\x02a\xff."], "aÿ"],
		["bytes", ["C\x02\x00\xff."], Uint8Array.of(0, 255)],
		["a list in batches", ["](K\x01K\x02eK\x03a."], [1, 2, 3]],
		["a set", ["\x8f(K\x01K\x01K\x02\x90."], new Set([1, 2])],
		["protocol and frame", ["\x80\x04\x95\x02\x00\x00\x00\x00\x00\x00\x00K\x07."], 7],
	];
	for (const [what, parts, expected] of cases) test(what, () => expect(load(...parts)).toEqual(expected));

	test("dict keys such as __proto__ are plain keys", () => {
		const map = load("}(", text("__proto__"), "K\x01K\x00K\x02", text("0"), "K\x03u.") as Map<unknown, unknown>;
		expect([...map]).toEqual([
			["__proto__", 1],
			[0, 2],
			["0", 3],
		]);
		expect(({} as Record<string, unknown>).polluted).toBeUndefined();
	});

	test("sharing and cycles go by reference", () => {
		const list = load("]\x94h\x00a.") as unknown[];
		expect(list[0]).toBe(list);
		const pair = load("]q\x00h\x00\x86.") as Tuple;
		expect(pair.items[0]).toBe(pair.items[1]);
	});
});

describe("allowed names", () => {
	test("an instance becomes a PythonObject", () => {
		const value = load(global("mine", "Thing"), ")\x81}", text("a"), "K\x01sb.") as PythonObject;
		expect(value).toBeInstanceOf(PythonObject);
		expect(String(value.type)).toBe("mine.Thing");
		expect(value.attribute("a")).toBe(1);
		const slots = load(global("mine", "Thing"), ")\x81N}", text("a"), "K\x02s\x86b.") as PythonObject;
		expect(slots.attribute("a")).toBe(2);
	});

	test("dtypes, sizes, paths, bytes", () => {
		expect(load(global("torch", "bfloat16"), ".")).toEqual(new TorchDtype("BF16"));
		expect(load(global("torch", "Size"), "K\x02K\x03\x86\x85R.")).toEqual([2, 3]);
		expect(load(global("pathlib", "PosixPath"), "(", text("/"), text("a"), text("b"), "tR.")).toBe("/a/b");
		const encoded = load(global("_codecs", "encode"), text("\u00ff\u0000"), text("latin1"), "\x86R.");
		expect(encoded).toEqual(Uint8Array.of(255, 0));
	});

	test("STACK_GLOBAL too", () => {
		expect(load(text("torch"), text("float32"), "\x93.")).toEqual(new TorchDtype("F32"));
	});
});

describe("refused", () => {
	const refused: [string, (string | number | Uint8Array)[], string][] = [
		["os.system", [global("os", "system"), text("true"), "\x85R."], "os.system is not on the list"],
		["posix.system", [text("posix"), text("system"), "\x93", text("true"), "\x85R."], "posix.system is not on"],
		["eval", [global("builtins", "eval"), text("1"), "\x85R."], "builtins.eval is not on the list"],
		["getattr", [global("builtins", "getattr"), "."], "builtins.getattr is not on the list"],
		["an inherited name", [global("constructor", "constructor"), "."], "is not on the list"],
		["a dotted name", [global("torch", "float32.__class__"), "."], "is not on the list"],
		["an enum-like attribute", [global("megatron.core.transformer.enums", "a.b"), "."], "is not on the list"],
		["calling a dtype", [global("torch", "float32"), ")R."], "torch.float32 may not be called"],
		["calling a value", ["K\x01)R."], "it calls a value that is not a class"],
		["calling without a tuple", [global("torch", "Size"), "]R."], "without a tuple"],
		["an invalid size", [global("torch", "Size"), "J\xff\xff\xff\xff\x85\x85R."], "a torch.Size is invalid"],
		["making room for bytes", [global("builtins", "bytearray"), "K\xff\x85R."], "bytes are built from another type"],
		["INST", ["(imine\nThing\n."], "opcode 0x69 is not allowed"],
		["OBJ", ["(", global("mine", "Thing"), "o."], "opcode 0x6f is not allowed"],
		["NEWOBJ_EX", ["NNN\x92."], "opcode 0x92 is not allowed"],
		["EXT1", ["\x82\x01."], "opcode 0x82 is not allowed"],
		["PERSID", ["Pid\n."], "opcode 0x50 is not allowed"],
		["BYTEARRAY8", ["\x96."], "opcode 0x96 is not allowed"],
		["a text opcode", ["I1\n."], "opcode 0x49 is not allowed"],
		["a storage where none is", ["NQ."], "it refers to a storage"],
		["a future protocol", ["\x80\x06."], "its protocol is unknown"],
		["the state of a list", ["]}b."], "sets the state of a value that has no state"],
		["a state twice", [global("mine", "Thing"), ")\x81}b}b."], "twice"],
		["appending to a dict", ["}Na."], "appends to a value that is not a list"],
		["items of a list", ["]NNs."], "sets items of a value that is not a dict"],
		["an odd number of items", ["}(Nu."], "sets items of a value that is not a dict"],
		["an empty stack", ["0."], "its stack is empty"],
		["a pop through a mark", ["N(\x85."], "its stack is empty"],
		["a missing mark", ["Nt."], "a mark is missing"],
		["a memo never set", ["h\x05."], "memo number 5 was never set"],
		["a memo far off", ["Nr\xff\xff\xff\x7f."], "memo number 2147483647 is out of order"],
		["several values at the end", ["NN."], "more than one value on its stack"],
		["a text longer than the file", ["X\xff\xff\xff\x7f."], "a text has 2147483647 bytes"],
		["bytes longer than the file", ["B\xff\xff\xff\xff."], "it is truncated"],
		["bytes of 2^63", ["\x8e\x00\x00\x00\x00\x00\x00\x00\x80."], "it is truncated"],
		["a frame longer than the file", ["\x95\xff\xff\xff\xff\x00\x00\x00\x00."], "it is truncated"],
		["a huge integer", ["\x8b\xff\xff\xff\x7f."], "an integer has 2147483647 bytes"],
		["text that is not UTF-8", ["\x8c\x01\xff."], "a text is not UTF-8"],
		["nothing", [""], "it is truncated"],
		["no STOP", ["N"], "it is truncated"],
	];
	for (const [what, parts, sentence] of refused) {
		test(what, () => {
			let failure: unknown;
			try {
				load(...parts);
			} catch (error) {
				failure = error;
			}
			expect(failure).toBeInstanceOf(UserError);
			expect((failure as Error).message).toStartWith("file: the pickle is refused at byte ");
			expect((failure as Error).message).toContain(sentence);
		});
	}

	test("each list has only its own names", () => {
		const namespace = bytes(global("argparse", "Namespace"), ")\x81.");
		expect(() => unpickle(namespace, "f", { allowed: metadataGlobals })).toThrow("argparse.Namespace is not on");
		expect(() => unpickle(namespace, "f", { allowed: tensorGlobals })).toThrow("argparse.Namespace is not on");
		expect(unpickle(namespace, "f", { allowed: stateGlobals() })).toBeInstanceOf(PythonObject);
		expect(() => load(global("mine", "Other"), ")\x81.")).toThrow("mine.Other is not on");
	});

	test("nesting, stack and size without bound", () => {
		expect(() => load("(".repeat(20_000))).toThrow("it is nested too deeply");
		expect(() => load("N".repeat(200_000))).toThrow("its stack grows without bound");
		expect(() => unpickle(new Uint8Array(9), "f", { allowed: tensorGlobals, limits: { bytes: 8 } })).toThrow("9 bytes");
		// A million nested lists are flat work for the machine.
		expect(load("]".repeat(90_000), "a".repeat(89_999), ".")).toBeArray();
	});
});
