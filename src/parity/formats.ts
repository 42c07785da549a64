/** The formats of reference folders. */
import type { Device } from "../native/device.ts";
import { layoutFor, type NamedTopology, namedTopology, parseLayout, World } from "../parallel/index.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";
import type { ParityReport } from "./comparison.ts";
import { elasticReference } from "./elastic/parity.ts";
import { compareEncoder, isEncoderReference } from "./encoder/parity.ts";
import { languageReference } from "./language/parity.ts";
import { mimoReference } from "./mimo/parity.ts";
import { mtpReference } from "./mtp/parity.ts";
import { picturesReference } from "./pictures/parity.ts";
import { type CompareOptions, compareTraining, type ReferenceFormat } from "./reference.ts";

const formats = [mimoReference, mtpReference, elasticReference, picturesReference, languageReference];

export function formatOf(folder: string): ReferenceFormat {
	return formats.find(({ holds }) => holds(folder))!;
}

/**
 * The layout to compare a folder on: the one asked for, otherwise the format's own. null: this process alone, without ranks. Throws
 * a UserError for a layout that the reference cannot run on, and for an option that it does not take.
 */
export function layoutOf(
	folder: string,
	asked: { readonly layout: string | null; readonly weights: string | null; readonly bf16: boolean },
): NamedTopology | null {
	if (isEncoderReference(folder)) {
		const flag = (
			[
				["--layout", asked.layout],
				["--weights", asked.weights],
				["--bf16", asked.bf16 || null],
			] as const
		).find(([, value]) => value !== null);
		if (flag === undefined || (flag[0] === "--layout" && flag[1] === "1")) return null;
		throw new UserError(
			`${flag[0]}: ${folder} is the reference of an encoder alone, which is compared in one process, in fp32 and with its own weights.`,
			exitCodes.usage,
		);
	}
	const format = formatOf(folder);
	const name = asked.layout ?? format.layout(folder);
	if (name === null) return null;
	if (format.ownWeights !== null && asked.weights !== null) {
		throw new UserError(`--weights ${asked.weights}: ${format.ownWeights} contains its weights.`, exitCodes.usage);
	}
	if (format.fp32Alone !== null && asked.bf16) {
		throw new UserError(`--bf16: ${format.fp32Alone} is compared in fp32.`, exitCodes.usage);
	}
	const named = namedTopology(layoutFor(parseLayout(name), { encoders: format.hasEncoder ? 1 : 0 }));
	format.plan(named, folder);
	return named;
}

/** Trains a folder's model in this process and compares. */
export async function compareAlone(
	device: Device,
	folder: string,
	options: CompareOptions = {},
): Promise<ParityReport> {
	if (isEncoderReference(folder)) return compareEncoder(device, folder, options);
	const format = formatOf(folder);
	const layout = namedTopology(layoutFor(parseLayout("1"), { encoders: format.hasEncoder ? 1 : 0 }));
	return await compareTraining(World.alone(device), layout, format, folder, options);
}
