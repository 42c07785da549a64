/**
 * The names that a pickle may use (docs/spec/checkpoint.md §2): list A for a .metadata index, B for tensors, C for other
 * state. Every name maps to a JavaScript value or function of this file; no Python code runs. An invalid argument throws a
 * RangeError, to which the machine adds the position in the pickle.
 */
import { type DtypeTag, dtypes, elementCount } from "../dtype.ts";
import type { AllowedGlobal, AllowedGlobals } from "./machine.ts";
import {
	Global,
	NumpyArray,
	NumpyDtype,
	PythonObject,
	StorageReference,
	TensorReference,
	TorchDtype,
	Tuple,
} from "./values.ts";

/** Most dimensions of a tensor, more than any model's tensors have. */
const LARGEST_RANK = 32;

type Table = ReadonlyMap<string, AllowedGlobal>;

/** A class whose instances become PythonObjects, without behaviour. */
function record(module: string, name: string): AllowedGlobal {
	const type = new Global(module, name);
	const make = (args: readonly unknown[]) => new PythonObject(type, args);
	return { call: make, create: make };
}

function records(module: string, names: readonly string[]): [string, AllowedGlobal][] {
	return names.map((name) => [`${module} ${name}`, record(module, name)]);
}

function size(args: readonly unknown[]): readonly number[] {
	const [sizes] = args;
	const items = sizes instanceof Tuple ? sizes.items : sizes;
	if (args.length !== 1 || !Array.isArray(items)) throw new RangeError("a torch.Size has no sizes");
	return wholeNumbers(items, "a torch.Size");
}

function wholeNumbers(items: readonly unknown[], what: string): readonly number[] {
	if (items.length > LARGEST_RANK || !items.every((item) => Number.isSafeInteger(item) && (item as number) >= 0)) {
		throw new RangeError(`${what} is invalid`);
	}
	return items as readonly number[];
}

function orderedDict(args: readonly unknown[]): Map<unknown, unknown> {
	const [pairs = []] = args;
	if (args.length > 1 || !Array.isArray(pairs)) throw new RangeError("an OrderedDict has no pairs");
	return new Map(
		pairs.map((pair) => {
			const items = pair instanceof Tuple ? pair.items : pair;
			if (!Array.isArray(items) || items.length !== 2) throw new RangeError("an OrderedDict has no pairs");
			return [items[0], items[1]] as const;
		}),
	);
}

/** Characters of the longest path that Linux allows. */
const LONGEST_PATH = 4096;

function posixPath(args: readonly unknown[]): string {
	let length = 0;
	for (const part of args) {
		if (typeof part !== "string") throw new RangeError("a path has parts that are not text");
		length += part.length + 1;
		if (length > LONGEST_PATH) throw new RangeError("a path is too long");
	}
	return args.join("/").replace(/^\/\//, "/");
}

const orderedDictEntry: [string, AllowedGlobal] = [
	"collections OrderedDict",
	{ call: orderedDict, create: orderedDict },
];

const torchDtypes: [string, AllowedGlobal][] = Object.entries(dtypes).map(([tag, { torch }]) => [
	`torch ${torch}`,
	{ value: new TorchDtype(tag as DtypeTag) },
]);

const shared: [string, AllowedGlobal][] = [
	orderedDictEntry,
	["torch Size", { call: size, create: size }],
	...torchDtypes,
];

const paths: [string, AllowedGlobal][] = ["pathlib", "pathlib._local"].flatMap((module) =>
	["PosixPath", "PurePosixPath", "Path"].map((name): [string, AllowedGlobal] => [
		`${module} ${name}`,
		{ call: posixPath, create: posixPath },
	]),
);

function setOf(args: readonly unknown[]): Set<unknown> {
	const [items = []] = args;
	if (args.length > 1 || !Array.isArray(items)) throw new RangeError("a set has no items");
	return new Set(items);
}

const sets: [string, AllowedGlobal][] = ["builtins", "__builtin__"].flatMap((module) =>
	["set", "frozenset"].map((name): [string, AllowedGlobal] => [`${module} ${name}`, { call: setOf, create: setOf }]),
);

const checkpointMetadata = "torch.distributed.checkpoint.metadata";

/** `torch.serialization._get_layout("torch.strided")`; other layouts are refused. */
function layout(args: readonly unknown[]): string {
	if (args.length !== 1 || args[0] !== "torch.strided") throw new RangeError("a tensor is not strided");
	return "torch.strided";
}

/** Tier A: the .metadata of a distributed checkpoint. */
const metadataTable: Table = new Map([
	...shared,
	...paths,
	...sets,
	["torch.serialization _get_layout", { call: layout }],
	...records(checkpointMetadata, [
		"Metadata",
		"TensorStorageMetadata",
		"BytesStorageMetadata",
		"ChunkStorageMetadata",
		"TensorProperties",
		"_MEM_FORMAT_ENCODING",
		"MetadataIndex",
		"StorageMeta",
	]),
	...records("torch.distributed.checkpoint.filesystem", ["_StorageInfo", "_StoragePrefix"]),
	...records("torch.distributed.checkpoint.planner", ["SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"]),
	...records("torch.distributed._shard.sharded_tensor.metadata", ["TensorProperties", "MEM_FORMAT_ENCODING"]),
	...records("megatron.core.dist_checkpointing.strategies.torch", ["MCoreMetadata", "MCoreSavePlan"]),
]);

function rebuildTensor(args: readonly unknown[]): TensorReference {
	const [storage, offset, shape, strides] = args;
	const dtype = storage instanceof StorageReference ? storage.dtype : null;
	if (dtype === null) throw new RangeError("a tensor has no typed storage");
	return tensor(storage, dtype, offset, shape, strides);
}

/** _rebuild_tensor_v3: untyped storage, the dtype as last argument. */
function rebuildTensorWithDtype(args: readonly unknown[]): TensorReference {
	const [storage, offset, shape, strides, , , dtype] = args;
	if (!(dtype instanceof TorchDtype)) throw new RangeError("a tensor has no dtype");
	return tensor(storage, dtype.tag, offset, shape, strides);
}

/** Checks that the view lies inside its storage. */
function tensor(storage: unknown, dtype: DtypeTag, offset: unknown, shape: unknown, strides: unknown): TensorReference {
	if (!(storage instanceof StorageReference)) throw new RangeError("a tensor has no storage");
	const list = (value: unknown, what: string) =>
		wholeNumbers(value instanceof Tuple ? value.items : Array.isArray(value) ? value : [null], what);
	const sizes = list(shape, "a tensor's size");
	const steps = list(strides, "a tensor's stride");
	if (!Number.isSafeInteger(offset) || (offset as number) < 0 || sizes.length !== steps.length) {
		throw new RangeError("a tensor's place in its storage is invalid");
	}
	const elements = elementCount(sizes);
	const last = sizes.reduce((sum, size, i) => sum + (size - 1) * steps[i]!, offset as number);
	const bits = dtypes[dtype].bits;
	const available = storage.dtype === null ? Math.floor((storage.length * 8) / bits) : storage.length;
	if (elements === null || (elements > 0 && !(last < available))) {
		throw new RangeError("a tensor reaches past its storage");
	}
	return new TensorReference(storage, dtype, offset as number, sizes, steps);
}

/** The tensor of a parameter or of a tensor subclass. */
function firstTensor(args: readonly unknown[]): TensorReference {
	if (!(args[0] instanceof TensorReference)) throw new RangeError("a parameter has no tensor");
	return args[0];
}

function rebuildFromType(args: readonly unknown[]): unknown {
	const [, type, inner] = args;
	const allowed =
		type instanceof Global && /^torch Tensor$|^torch\.nn\.parameter Parameter$/.test(`${type.module} ${type.name}`);
	if (!allowed || !(inner instanceof Tuple)) throw new RangeError("a tensor has an unknown type");
	return rebuildTensor(inner.items);
}

/** A class of the torch module that names a storage's element type. */
export class StorageType {
	constructor(readonly dtype: DtypeTag | null) {}
}

const storageTypes: [string, AllowedGlobal][] = Object.entries(dtypes).flatMap(([tag, { storage }]) =>
	storage === null
		? []
		: [[`torch ${storage}`, { value: new StorageType(tag as DtypeTag) }] as [string, AllowedGlobal]],
);

/** Tier B: tensors of torch.save. */
const tensorTable: Table = new Map([
	...shared,
	...storageTypes,
	["torch.storage UntypedStorage", { value: new StorageType(null) }],
	["torch.storage TypedStorage", { value: new StorageType(null) }],
	["torch._utils _rebuild_tensor", { call: rebuildTensor }],
	["torch._utils _rebuild_tensor_v2", { call: rebuildTensor }],
	["torch._utils _rebuild_tensor_v3", { call: rebuildTensorWithDtype }],
	["torch._utils _rebuild_parameter", { call: firstTensor }],
	["torch._utils _rebuild_parameter_with_state", { call: firstTensor }],
	["torch._tensor _rebuild_from_type_v2", { call: rebuildFromType }],
	["torch Tensor", {}],
	["torch.nn.parameter Parameter", {}],
]);

/** `_codecs.encode(text, "latin1")`: how protocol 2 writes bytes. */
function encode(args: readonly unknown[]): Uint8Array {
	const [text, encoding] = args;
	if (typeof text !== "string" || encoding !== "latin1") throw new RangeError("bytes are not encoded as latin1");
	const bytes = Uint8Array.from(text, (character) => character.charCodeAt(0));
	if (Buffer.from(bytes).toString("latin1") !== text) throw new RangeError("bytes are not encoded as latin1");
	return bytes;
}

/** bytes(), bytearray(b) and BytesIO(b): the bytes. A length as argument, which allocates zeros, is refused. */
function byteValue(args: readonly unknown[]): Uint8Array {
	const [value = new Uint8Array(0), encoding] = args;
	if (typeof value === "string" && encoding !== undefined)
		return encode(args.map((a) => (a === "latin-1" ? "latin1" : a)));
	if (!(value instanceof Uint8Array)) throw new RangeError("bytes are built from another type");
	return value;
}

function numpyDtype(args: readonly unknown[]): NumpyDtype {
	const code = args[0];
	if (typeof code !== "string" || !/^[<>|=]?([biufcSUVO?]|bool)\d*$/.test(code)) {
		throw new RangeError("a numpy dtype has an unknown code");
	}
	const dtype = new NumpyDtype(code.replace(/^[<>|=]/, ""));
	dtype.bigEndian = code.startsWith(">");
	return dtype;
}

function numpyScalar(args: readonly unknown[]): NumpyArray {
	const [dtype, data] = args;
	if (!(dtype instanceof NumpyDtype) || !(data instanceof Uint8Array)) {
		throw new RangeError("a numpy scalar has no value");
	}
	const array = new NumpyArray();
	array.dtype = dtype;
	array.data = data;
	return array;
}

const numpy: [string, AllowedGlobal][] = [
	["numpy ndarray", { value: new Global("numpy", "ndarray") }],
	["numpy dtype", { call: numpyDtype }],
	...["numpy.core.multiarray", "numpy._core.multiarray"].flatMap((module): [string, AllowedGlobal][] => [
		[`${module} _reconstruct`, { call: () => new NumpyArray() }],
		[`${module} scalar`, { call: numpyScalar }],
	]),
];

/** Tier C: common state and other objects. */
const stateTable: Table = new Map([
	...metadataTable,
	...tensorTable,
	...numpy,
	["_codecs encode", { call: encode }],
	["_io BytesIO", { call: byteValue, create: byteValue }],
	...["builtins", "__builtin__"].flatMap((module): [string, AllowedGlobal][] => [
		[`${module} bytes`, { call: byteValue, create: byteValue }],
		[`${module} bytearray`, { call: byteValue, create: byteValue }],
		...records(module, ["complex", "slice"]),
	]),
	...records("argparse", ["Namespace"]),
	...records("types", ["SimpleNamespace"]),
	...records("signal", ["Signals"]),
	...records("torch", ["device"]),
	...records("megatron.core.enums", ["ModelType"]),
	...records("megatron.core.optimizer", ["OptimizerConfig"]),
	...records("megatron.core.optimizer.optimizer_config", ["OptimizerConfig"]),
]);

export const metadataGlobals: AllowedGlobals = (module, name) => metadataTable.get(`${module} ${name}`);
export const tensorGlobals: AllowedGlobals = (module, name) => tensorTable.get(`${module} ${name}`);

/**
 * Tier C. Classes of Megatron's own enumerations and rerun machine, and those named in `inert` ("module Class"), become
 * inert descriptions; any other name is refused.
 */
export function stateGlobals(inert: readonly string[] = []): AllowedGlobals {
	const admitted = new Set(inert);
	return (module, name) => {
		const key = `${module} ${name}`;
		const known = stateTable.get(key);
		if (known) return known;
		const megatron =
			/^megatron\.core\.transformer\.enums$/.test(module) ||
			(module === "megatron.core.rerun_state_machine" && name.startsWith("Rerun"));
		return (megatron && /^[A-Za-z]\w*$/.test(name)) || admitted.has(key) ? record(module, name) : undefined;
	};
}
