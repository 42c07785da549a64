import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { tensorGlobals } from "../../../src/checkpoint/pickle/allowed.ts";
import { openTorchFile, TorchArchive, ZipArchive } from "../../../src/checkpoint/pickle/archive.ts";
import { PythonObject, TensorReference, Tuple } from "../../../src/checkpoint/pickle/values.ts";
import { InputFile } from "../../../src/system/input-file.ts";
import { golden } from "../../golden.ts";

let folder: string;
beforeAll(() => {
	folder = mkdtempSync(join(tmpdir(), "mimo-archive-"));
});
afterAll(() => rmSync(folder, { recursive: true }));

const energon = golden("energon");
const energonClasses = [
	"megatron.energon.state FlexState",
	"megatron.energon.savable_loader SavableDataLoaderState",
	"megatron.energon.savable_loader SavableDatasetState",
	"megatron.energon.savable_loader SavableDatasetCheckpoint",
	"megatron.energon.flavors.webdataset.sample_loader SliceState",
	"megatron.energon.rng SystemRngState",
];

describe("files of torch.save", () => {
	const states = join(energon, "states");
	const path = join(states, "w2x2.rank0.pt");

	test("every state is read, with inert classes", () => {
		for (const name of readdirSync(states).filter((name) => name.endsWith(".pt"))) {
			using file = openTorchFile(join(states, name), { inert: energonClasses });
			expect(String((file.value as PythonObject).type)).toBe("megatron.energon.savable_loader.SavableDataLoaderState");
		}
	});

	test("tensors of a state", () => {
		using file = openTorchFile(path, { inert: energonClasses });
		const found: TensorReference[] = [];
		const visit = (value: unknown): void => {
			if (value instanceof TensorReference) found.push(value);
			else if (value instanceof PythonObject) [value.state, value.entries, value.items].forEach(visit);
			else if (value instanceof Tuple) value.items.forEach(visit);
			else if (value instanceof Map) [...value.values()].forEach(visit);
			else if (Array.isArray(value)) value.forEach(visit);
		};
		visit(file.value);
		expect(found.map(({ dtype, shape }) => [dtype, shape])).toEqual([
			["U8", [5056]],
			["U8", [5056]],
		]);
		// torch's Mersenne twister: seeded, 624 words left or fewer, then the words.
		expect(file.readTensor(found[0]!).length).toBe(5056);
	});

	test("a class that is not on the list is refused by name", () => {
		expect(() => openTorchFile(path)).toThrow(
			"megatron.energon.savable_loader.SavableDataLoaderState is not on the list",
		);
	});

	test("a truncation anywhere is refused", () => {
		const whole = readFileSync(path);
		const cut = join(folder, "cut.pt");
		for (let i = 0; i < 100; i++) {
			writeFileSync(cut, whole.subarray(0, Math.floor((whole.length * i) / 100)));
			expect(() => openTorchFile(cut, { inert: energonClasses })).toThrow(cut);
		}
	});

	test("a damaged pickle is found by its checksum", () => {
		const bytes = readFileSync(path);
		const at = bytes.indexOf("worker_states");
		bytes[at] = 0x57;
		const damaged = join(folder, "damaged.pt");
		writeFileSync(damaged, bytes);
		expect(() => openTorchFile(damaged, { inert: energonClasses })).toThrow("is damaged (its checksum differs)");
	});
});

/** A zip of stored records; `change` may falsify fields of a directory entry. */
function zip(
	records: readonly (readonly [string, Uint8Array])[],
	change: (entry: DataView, index: number) => void = () => {},
): Uint8Array {
	const parts: Uint8Array[] = [];
	const directory: Uint8Array[] = [];
	let position = 0;
	const push = (list: Uint8Array[], bytes: Uint8Array) => {
		list.push(bytes);
		if (list === parts) position += bytes.length;
	};
	records.forEach(([name, data], index) => {
		const local = Buffer.alloc(30);
		local.writeUInt32LE(0x04034b50, 0);
		local.writeUInt16LE(name.length, 26);
		const entry = Buffer.alloc(46);
		entry.writeUInt32LE(0x02014b50, 0);
		entry.writeUInt32LE(data.length, 20);
		entry.writeUInt32LE(data.length, 24);
		entry.writeUInt16LE(name.length, 28);
		entry.writeUInt32LE(position, 42);
		change(new DataView(entry.buffer, entry.byteOffset, 46), index);
		for (const piece of [local, Buffer.from(name), data]) push(parts, piece);
		push(directory, Buffer.concat([entry, Buffer.from(name)]));
	});
	const end = Buffer.alloc(22);
	end.writeUInt32LE(0x06054b50, 0);
	end.writeUInt16LE(records.length, 10);
	end.writeUInt32LE(
		directory.reduce((sum, { length }) => sum + length, 0),
		12,
	);
	end.writeUInt32LE(position, 16);
	return Buffer.concat([...parts, ...directory, end]);
}

function open(bytes: Uint8Array): ZipArchive {
	const path = join(folder, "zip");
	writeFileSync(path, bytes);
	return ZipArchive.open(InputFile.open(path));
}

describe("zip", () => {
	const records = [
		["a/data.pkl", Buffer.from("N.")],
		["a/data/0", new Uint8Array(24)],
	] as const;

	test("records of an item inside a file", () => {
		const path = join(folder, "items");
		const item = zip(records);
		writeFileSync(path, Buffer.concat([new Uint8Array(100), item, new Uint8Array(50)]));
		using file = InputFile.open(path);
		const archive = ZipArchive.open(file, 100, item.length);
		expect([...archive.names]).toEqual(["a/data.pkl", "a/data/0"]);
		expect(archive.read("a/data/0", 24)).toEqual(new Uint8Array(24));
		expect(() => archive.read("a/data/0", 23)).toThrow("record a/data/0 has 24 bytes");
		expect(new TorchArchive(archive).load(tensorGlobals)).toBeNull();
	});

	test("invalid archives are refused", () => {
		const refuse = (change: (entry: DataView, index: number) => void, sentence: string) =>
			expect(() => open(zip(records, change)).read("a/data/0", 100)).toThrow(sentence);
		refuse((entry) => entry.setUint16(10, 8, true), "record a/data.pkl is compressed");
		refuse((entry) => entry.setUint32(20, 1, true), "record a/data.pkl is compressed");
		refuse((entry) => entry.setUint16(8, 1, true), "record a/data.pkl is encrypted");
		refuse((entry, i) => i === 1 && entry.setUint32(42, 0, true), "records a/data.pkl and a/data/0 overlap");
		refuse((entry, i) => i === 1 && entry.setUint32(42, 5, true), "overlap");
		refuse((entry) => entry.setUint32(42, 10_000, true), "record a/data.pkl lies outside");
		refuse((entry) => {
			entry.setUint32(20, 2 ** 31, true);
			entry.setUint32(24, 2 ** 31, true);
		}, "lies outside");
		refuse((entry) => entry.setUint32(24, 0xffffffff, true), "record a/data.pkl lacks its zip64 size");
		refuse((entry) => entry.setUint16(28, 60_000, true), "its directory is damaged");
		expect(() => open(zip([records[0]!, records[0]!]))).toThrow("record a/data.pkl occurs twice");
		expect(() => open(new Uint8Array(21))).toThrow("it is truncated");
		expect(() => open(new Uint8Array(100))).toThrow("its end record is missing");
	});

	test("a header with another name, a directory that lies", () => {
		const renamed = Buffer.from(zip(records));
		renamed.write("a/data/1", renamed.indexOf("a/data/0"));
		expect(() => open(renamed).read("a/data/0", 100)).toThrow("has another name in its header");
		const lying = Buffer.from(zip(records));
		lying.writeUInt16LE(60_000, lying.length - 12);
		expect(() => open(lying)).toThrow("its directory has an invalid size");
		lying.writeUInt32LE(2 ** 31, lying.length - 10);
		expect(() => open(lying)).toThrow("its directory has an invalid size");
	});

	test("no pickle, two pickles, an old file", () => {
		expect(() => new TorchArchive(open(zip([records[1]!])))).toThrow("it has no data.pkl");
		expect(() => new TorchArchive(open(zip([records[0]!, ["b/data.pkl", records[0]![1]]])))).toThrow(
			"it has no data.pkl",
		);
		const old = join(folder, "old.pt");
		writeFileSync(old, Buffer.from("\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", "latin1"));
		expect(() => openTorchFile(old)).toThrow("before PyTorch 1.6");
	});
});

describe("tensors", () => {
	/** A torch.save archive of one f32 tensor of six values, its view given as pickle text. */
	const archive = (offset: string, shape: string, strides: string, storageLength = "K\x06", data = 24, key = "0") => {
		const text = (value: string) => `X${String.fromCharCode(value.length)}\0\0\0${value}`;
		const pickle = `\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((${text("storage")}ctorch\nFloatStorage\n${text(key)}${text("cpu")}${storageLength}tQ${offset}(${shape}t(${strides}t\x89ccollections\nOrderedDict\n)RtR.`;
		return new TorchArchive(
			open(
				zip([
					["archive/data.pkl", Buffer.from(pickle, "latin1")],
					["archive/data/0", new Uint8Array(Float32Array.from({ length: data / 4 }, (_, i) => i).buffer)],
				]),
			),
		);
	};
	const read = (...args: Parameters<typeof archive>) => {
		const opened = archive(...args);
		return opened.read(opened.load(tensorGlobals) as TensorReference);
	};

	test("contiguous, offset, transposed, scalar", () => {
		expect(read("K\x00", "K\x02K\x03", "K\x03K\x01")).toEqual(Float32Array.of(0, 1, 2, 3, 4, 5));
		expect(read("K\x02", "K\x02", "K\x01")).toEqual(Float32Array.of(2, 3));
		expect(read("K\x00", "K\x03K\x02", "K\x01K\x03")).toEqual(Float32Array.of(0, 3, 1, 4, 2, 5));
		expect(read("K\x05", "", "")).toEqual(Float32Array.of(5));
		expect(read("K\x00", "K\x00", "K\x01")).toEqual(new Float32Array(0));
	});

	test("views outside of their storage are refused", () => {
		expect(() => read("K\x01", "K\x06", "K\x01")).toThrow("a tensor reaches past its storage");
		expect(() => read("K\x00", "K\x02", "K\x06")).toThrow("a tensor reaches past its storage");
		expect(() => read("J\xff\xff\xff\xff", "K\x02", "K\x01")).toThrow("a tensor's place in its storage is invalid");
		expect(() => read("K\x00", "K\x02", "J\xff\xff\xff\xff")).toThrow("a tensor's stride is invalid");
		expect(() => read("K\x00", "K\x02", "K\x01K\x01")).toThrow("a tensor's place in its storage is invalid");
		expect(() => read("K\x00", "K\x06", "K\x01", "K\x07")).toThrow("storage 0 has 24 bytes, and its tensor needs 28");
		expect(() => read("K\x00", "K\x06", "K\x01", "K\x06", 24, "../0")).toThrow("a storage has an invalid key");
		expect(() => read("K\x00", "J\xff\xff\xff\x7f", "K\x00")).toThrow("repeats few stored elements");
		const wide = "\x8a\x07\xff\xff\xff\xff\xff\xff\x1f";
		expect(() => read("K\x00", "K\x06", "K\x01", wide)).toThrow("a storage has an invalid size");
		expect(() => read("K\x00", `${wide}${wide}`, "K\x00K\x00")).toThrow("a tensor reaches past its storage");
	});
});
