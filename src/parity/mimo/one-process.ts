/** A mimo-* reference folder on layout `1`: one process holds both modules and accumulates the microbatches of all lanes. */
import type { EncoderConfig } from "../../models/vision/encoder.ts";
import type { Device } from "../../native/device.ts";
import { namedTopology, parseLayout, World } from "../../parallel/index.ts";
import type { Precision } from "../bf16.ts";
import type { ParityReport } from "../comparison.ts";
import { mimoLayoutParity } from "./layout.ts";

export interface MimoParityOptions {
	readonly onStep?: (step: number, of: number) => void;
	/** Default fp32, compared value by value; bf16 only by its losses. */
	readonly precision?: Precision;
	/** Stop after this many steps; default all. */
	readonly steps?: number;
	/** Checkpoint of any format to take the weights from; default: the folder's own. */
	readonly weights?: string | undefined;
	/** May change the encoder that config.json describes: to see whether the comparison notices. */
	readonly configure?: (config: EncoderConfig) => EncoderConfig;
}

/** Trains both modules in this process as the reference did and compares. */
export async function mimoParity(device: Device, path: string, options: MimoParityOptions = {}): Promise<ParityReport> {
	return await mimoLayoutParity(World.alone(device), namedTopology(parseLayout("1")), path, options);
}
