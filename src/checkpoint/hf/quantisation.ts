/** The meaning of a config.json's quantization_config for the weights, and the store in which they are bf16. */
import { UserError } from "../../system/errors.ts";
import type { TensorStore } from "../store.ts";
import { Fp8Weights, type ScaledBlock } from "./fp8.ts";
import { formatPythonJson, parseKeepingFloats } from "./json.ts";
import { Mxfp4Stacks } from "./mxfp4.ts";

type Fields = Readonly<Record<string, unknown>>;
type Stored = Pick<TensorStore, "path" | "tensors" | "readInto">;

/** A config.json as of a folder whose weights are bf16. */
export interface Unquantised {
	/** As it stands in the folder where nothing is quantised. */
	readonly configText: string;
	/** The folder's tensors as bf16; null: nothing is quantised. */
	readonly decode: ((source: Stored) => Pick<TensorStore, "tensors" | "readInto">) | null;
	/** A sentence for the user; null: nothing is quantised. */
	readonly notice: string | null;
}

/** Throws a UserError that names the method where weights that are quantised by it cannot be read. */
export function unquantised(text: string, path: string): Unquantised {
	const plain = { configText: text, decode: null, notice: null };
	if (!text.includes('"quantization_config"')) return plain;
	const { quantization_config: whole, ...config } = parseKeepingFloats(text, path);
	const language = (config.text_config ?? null) as Fields | null;
	const { quantization_config: own, ...languageConfig } = language ?? {};
	// As in transformers: that of the language model counts where the whole model has none.
	const said = (whole ?? own ?? null) as Fields | null;
	if (said === null) return plain;
	const { quant_method: method, ...rest } = said;
	const family = String(language?.model_type ?? config.model_type ?? "a model without model_type");
	const where = `${path}: ${family}: ${whole == null ? "text_config." : ""}quantization_config`;
	const decode =
		method === "mxfp4" ? (source: Stored) => new Mxfp4Stacks(source) : method === "fp8" ? fp8(rest, where) : null;
	if (decode === null) {
		throw new UserError(
			`${where}.quant_method is ${JSON.stringify(method)}; weights in "fp8" and "mxfp4" can be read, and those that are not quantised.`,
		);
	}
	const notice = `${path}: weights in ${String(method).toUpperCase()} are read as bf16, and written so, without quantization_config.`;
	const kept = language === null ? config : { ...config, text_config: languageConfig };
	return { configText: formatPythonJson(kept), decode, notice };
}

function fp8({ fmt = "e4m3", weight_block_size: block = null }: Fields, where: string) {
	const isSize = (size: unknown) => Number.isSafeInteger(size) && (size as number) > 0;
	if (block !== null && !(Array.isArray(block) && block.length === 2 && block.every(isSize))) {
		throw new UserError(`${where}.weight_block_size is ${JSON.stringify(block)}, expected two whole numbers from 1.`);
	}
	if (fmt !== "e4m3") {
		throw new UserError(`${where}.fmt is ${JSON.stringify(fmt)}, and "e4m3" alone can be read.`);
	}
	return (source: Stored) => new Fp8Weights(source, block as ScaledBlock);
}
