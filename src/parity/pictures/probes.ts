/** Compares the encoder's values of step 1 with those that a reference recorded, wherever the pictures' rows lie. */
import { featuresOf, type ImageTextMicrobatch } from "../../data/microbatch.ts";
import type { PatchGrid, Tower } from "../../models/tower.ts";
import { visionModule } from "../../parallel/index.ts";
import type { Run } from "../../train/assemble.ts";
import type { MicrobatchObserver } from "../../train/rank-passes.ts";
import type { Check } from "../comparison.ts";
import { type Probe, ProbeSums } from "../probe-sums.ts";
import { encoderSamples, type Plan } from "../verify/samples.ts";
import { mergedOrder } from "./batches.ts";

/** transformers' values by the encoder's names for them, but for layers; the tower's before its rows are joined. */
const names: Readonly<Record<string, readonly string[]>> = {
	embedder: ["vision.patch_embed"],
	decoder_input: ["vision.layer.0.input"],
	radio_out: ["vision.norm"],
	encoder_out: ["projector.input"],
	// Qwen's names, and those of others.
	projector: ["vision.merger", "projector"],
};

type Recorded = Readonly<Record<string, Omit<Probe, "name" | "elements"> & { readonly shape: readonly number[] }>>;

interface Place {
	readonly run: Run;
	readonly plan: Plan;
	readonly tower: Tower;
}

/** Every rank of the run makes one for step 1, observes with it, and calls `checks` together with all others. */
export class EncoderProbes {
	readonly #probes: ProbeSums;
	readonly #index = new Map<string, number>();
	/** Grids of each sample's pictures. */
	readonly #grids: readonly (readonly PatchGrid[])[];
	/** Whether patches are recorded in Qwen's order. */
	readonly #merged: boolean;

	/** The tower has the layers that the model reads; a reference may record more. */
	constructor(
		recorded: Recorded,
		samples: readonly ImageTextMicrobatch[],
		readonly place: Place,
	) {
		this.#grids = samples.map((sample) => featuresOf(sample, visionModule).grids);
		const layers = Array.from({ length: place.tower.stream!.layers }, (_, layer) => `vision.layer.${layer}`);
		const computed = [...Object.values(names).flat(), ...layers];
		this.#merged = "vision.merger" in recorded;
		const wanted = Object.keys(recorded).filter(
			(name) => computed.includes(name) || /^vision\.deepstack\.\d+$/.test(name),
		);
		for (const [index, name] of wanted.entries()) this.#index.set(name, index);
		this.#probes = new ProbeSums(
			wanted.map((name) => {
				const { shape, ...values } = recorded[name]!;
				return { ...values, name: `step 1 ${name}`, elements: shape.reduce((product, size) => product * size, 1) };
			}),
		);
	}

	/** Adds this rank's part of a value of step 1; tensor-parallel ranks have the same values. */
	readonly observe: MicrobatchObserver = (name, value, microbatch) => {
		const prefix = `${visionModule}.`;
		if (!name.startsWith(prefix)) return;
		const own = name.slice(prefix.length);
		const probe = (names[own] ?? [`vision.${own}`]).map((name) => this.#index.get(name)).find((at) => at !== undefined);
		const { run, plan, tower } = this.place;
		const encoder = run.encoders.find(({ name }) => name === visionModule)!;
		if (probe === undefined || encoder.groups.model.tp.rank !== 0) return;
		const joined = own === "encoder_out" || own === "projector" || own.startsWith("deepstack");
		const rowsOf = (grid: PatchGrid) => (joined ? tower.rowsOf(grid) : tower.stream!.rowsOf(grid));
		const rowsOfSample = this.#grids.map((grids) => grids.reduce((sum, grid) => sum + rowsOf(grid), 0));
		const edge = plan.topology.featureEdges[0]!;
		const lane = edge.encoder.coordinates(run.rank).dp;
		const values = value.toFloat32();
		let row = 0;
		for (const sample of encoderSamples(plan, [...rowsOfSample.keys()], edge, lane, microbatch)) {
			const first = rowsOfSample.slice(0, sample).reduce((sum, rows) => sum + rows, 0);
			const end = row + rowsOfSample[sample]!;
			const rows = values.subarray(row * value.width, end * value.width);
			// Layers of windows have their reference's order.
			const reordered = this.#merged && !joined && (own === "embedder" || !tower.stream!.windowed);
			const order = reordered ? rowsInOrder(rows, value.width, this.#grids[sample]!) : rows;
			this.#probes.add(probe, order, first * value.width);
			row = end;
		}
	};

	/** Comparisons of the sums of all ranks; after step 1. */
	checks(): Check[] {
		const { world, scalars } = this.place.run.state;
		return this.#probes.checks(world, scalars.device);
	}
}

/** Rows of a sample's pictures, row by row, in Qwen's order. */
function rowsInOrder(values: Float32Array, width: number, grids: readonly PatchGrid[]): Float32Array {
	const ordered = new Float32Array(values.length);
	let [first, to] = [0, 0];
	for (const grid of grids) {
		for (const place of mergedOrder(grid)) {
			ordered.set(values.subarray((first + place) * width, (first + place + 1) * width), to);
			to += width;
		}
		first += grid.rows * grid.columns;
	}
	return ordered;
}
