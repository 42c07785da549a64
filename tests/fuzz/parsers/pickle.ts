import { layoutOfArguments } from "../../../src/checkpoint/conversion/layouts.ts";
import { stateGlobals } from "../../../src/checkpoint/pickle/allowed.ts";
import { storageOf } from "../../../src/checkpoint/pickle/archive.ts";
import { unpickle } from "../../../src/checkpoint/pickle/machine.ts";
import { Global, PythonObject, TorchDtype, Tuple } from "../../../src/checkpoint/pickle/values.ts";
import { Call, instance, pickle, torchSize } from "../../../src/checkpoint/pickle/writer.ts";
import { configurationFromArguments } from "../../../src/checkpoint/torch-dist/arguments.ts";
import { isJsonObject, jsonOf } from "../../../src/checkpoint/torch-dist/common.ts";
import { type FuzzParser, inputName } from "../parser.ts";

/** Pickles of every kind that is read. */
function examples(): Uint8Array[] {
	const args = new PythonObject(new Global("argparse", "Namespace"), []);
	args.state = new Map<string, unknown>([
		["hidden_size", 128],
		["hybrid_layer_pattern", "M[*E]-"],
		["moe_mlp_glu_interleave_size", 32],
		["num_attention_heads", 4],
		["dtype", new TorchDtype("BF16")],
		["sizes", torchSize([2, 3])],
		["path", new Call(new Global("pathlib", "PosixPath"), ["/", "a"])],
	]);
	const group = new Map<string, unknown>([
		["lr", 1e-3],
		["betas", new Tuple([0.9, 0.95])],
		["step", 2 ** 40],
	]);
	const index = instance("torch.distributed.checkpoint.metadata", "MetadataIndex", { fqn: "w", index: null });
	return [
		pickle(
			new Map<unknown, unknown>([
				["args", args],
				["optimizer", [group, group]],
				[0, -(5n ** 40n)],
			]),
		),
		pickle(new Map([[index, instance("torch.distributed.checkpoint.metadata", "BytesStorageMetadata")]])),
		pickle([new Call(new Global("_codecs", "encode"), ["abc", "latin1"])]),
		// Protocols 0 to 2 and sets, as Python writes them.
		Buffer.from("\x80\x02c__builtin__\nset\n](K\x01K\x02e\x85R.", "latin1"),
		Buffer.from("\x80\x04\x8c\x0bcollections\x94\x8c\x0bOrderedDict\x94\x93)R\x94(K\x01\x8f(K\x02\x90u.", "latin1"),
	];
}

const opcodes = [
	..."()].}0NR2aeubtsQ\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x93\x94",
	...[
		"\x80\x02",
		"K\x01",
		"M\xff\xff",
		"h\x00",
		"q\x00",
		"j\x01\x00\x00\x00",
		"r\x00\x00\x00\x00",
		"G\x7f\xf0\x00\x00",
	],
	...[
		"\x8a\x08",
		"\x8b\xff\xff\x00\x00",
		"X\x04\x00\x00\x00args",
		"\x8c\x01a",
		"C\x02ab",
		"]\x940",
		"h\x00h\x00\x86\x94",
	],
	...["ccollections\nOrderedDict\n", "cbuiltins\nset\n", "c_codecs\nencode\n", "cnumpy\ndtype\n", "cos\nsystem\n"],
	...["cnumpy.core.multiarray\n_reconstruct\n", "cargparse\nNamespace\n", "ctorch._utils\n_rebuild_tensor_v2\n"],
	...["cpathlib\nPosixPath\n", "ctorch\nFloatStorage\n", "X\x07\x00\x00\x00storage", "X\x09\x00\x00\x00__proto__"],
].map((text) => Buffer.from(text, "latin1"));

export default {
	about: "pickles of state, as plain data, and the model's configuration in them",
	open: () => {
		const allowed = stateGlobals(["some.module Class"]);
		return {
			seeds: examples(),
			dictionary: opcodes,
			parse: (bytes) => {
				const state = jsonOf(unpickle(bytes, inputName, { allowed, persistent: storageOf }), inputName);
				if (!isJsonObject(state) || !isJsonObject(state.args)) return;
				configurationFromArguments(state.args);
				layoutOfArguments(state.args, inputName);
			},
		};
	},
} satisfies FuzzParser;
