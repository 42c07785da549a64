/**
 * Layers that a source has no counterpart for, Mamba-2 layers of a hybrid model that was a GPT model: initial values as a training
 * from the start draws them (docs/spec/language-model.md §6), zero moments.
 */
import { initialise, philoxKey } from "../../models/initialise.ts";
import { describedConfig } from "../../models/language/from-configuration.ts";
import { layerPrefix } from "../../models/language/layer-numbering.ts";
import { hybridParameters } from "../../models/language/names.ts";
import type { ParameterSpec } from "../../models/parameter-spec.ts";
import { Device } from "../../native/device.ts";
import { openLibrary } from "../../native/library.ts";
import { UserError } from "../../system/errors.ts";
import { Tensor } from "../../tensor/index.ts";
import { encodeFloats } from "../cast-floats.ts";
import { type DtypeTag, elementCount } from "../dtype.ts";
import type { LanguageModelConfiguration } from "../hf/families/family.ts";
import type { TensorStore, TensorType } from "../store.ts";
import { optimizerName, optimizerStates } from "../training/tensors.ts";

/** Tensors of new layers. Their values exist once they were drawn. */
export class NewLayers implements TensorStore {
	readonly tensors: ReadonlyMap<string, TensorType>;
	readonly #values = new Map<string, Uint8Array>();

	private constructor(
		readonly path: string,
		private readonly specs: readonly ParameterSpec[],
		private readonly seed: number,
		types: ReadonlyMap<string, TensorType>,
	) {
		this.tensors = types;
	}

	/**
	 * `layers`: their numbers. Weights have the type `dtype` where a run has them in its own; `optimizer`: with masters and moments.
	 * Throws a UserError that names `path` where the configuration's sizes make no Mamba-2 layer.
	 */
	static of(
		path: string,
		layers: readonly number[],
		configuration: LanguageModelConfiguration,
		{ dtype, optimizer, seed }: { readonly dtype: DtypeTag; readonly optimizer: boolean; readonly seed: number },
	): NewLayers {
		requireSizes(configuration, path);
		const prefixes = layers.map(layerPrefix);
		const specs = hybridParameters(describedConfig(configuration, { bf16: false })).filter(({ name }) =>
			prefixes.some((prefix) => name.startsWith(prefix)),
		);
		const types = new Map<string, TensorType>();
		for (const { name, shape, alwaysF32 } of specs) {
			types.set(name, { dtype: alwaysF32 ? "F32" : dtype, shape });
			if (!optimizer) continue;
			for (const state of optimizerStates) types.set(optimizerName(state, name), { dtype: "F32", shape });
		}
		return new NewLayers(path, specs, seed, types);
	}

	/** Draws the values; before it none can be read. */
	async draw(): Promise<void> {
		using device = Device.open(await openLibrary("cpu"), { threads: 1 });
		for (const { name, shape, initialisation } of this.specs) {
			const rows = shape[0]!;
			const columns = elementCount(shape)! / rows;
			using tensor = Tensor.empty(device, [rows, columns], "f32");
			const block = { firstRow: 0, rows, firstColumn: 0, columns, fullWidth: columns };
			initialise(device, tensor, initialisation, philoxKey(this.seed, name), block);
			const values = tensor.toFloat32();
			this.#values.set(name, encodeFloats(this.tensors.get(name)!.dtype, values));
			this.#values.set(optimizerName("param", name), encodeFloats("F32", values));
		}
	}

	originsOf(): [] {
		return [];
	}

	readInto(name: string, offset: number, into: Uint8Array): void {
		const values = this.#values.get(name);
		if (values) into.set(values.subarray(offset, offset + into.byteLength));
		else if (/^optimizer\.state\.exp_avg(_sq)?\./.test(name)) into.fill(0);
		else throw new RangeError(`The values of ${name} were not drawn yet.`);
	}

	[Symbol.dispose](): void {
		this.#values.clear();
	}
}

function requireSizes(c: LanguageModelConfiguration, path: string): void {
	const sizes = [c.mambaNumHeads, c.mambaHeadDim, c.mambaNumGroups, c.mambaStateDim];
	if (sizes.every((size) => Number.isSafeInteger(size) && size > 0) && c.mambaNumHeads % c.mambaNumGroups === 0) return;
	throw new UserError(
		`${path}: no Mamba-2 layer has mamba-num-heads ${c.mambaNumHeads}, mamba-head-dim ${c.mambaHeadDim}, mamba-num-groups ${c.mambaNumGroups} and mamba-state-dim ${c.mambaStateDim}.`,
	);
}
