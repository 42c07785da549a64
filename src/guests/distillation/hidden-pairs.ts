/**
 * Hidden states that the student learns from the teacher's (docs/spec/elastic.md §11). A pair's loss is computed where the student's layer
 * is: the teacher's states travel there, and the losses on to the output layer. Their weights depend on the losses there, and come
 * back to the stages before a microbatch goes backward.
 */
import { lossTokens } from "../../data/microbatch.ts";
import type { HybridConfig } from "../../models/language/config.ts";
import { kinds } from "../../models/language/kinds/index.ts";
import { layerPrefix } from "../../models/language/layer-numbering.ts";
import type { ForwardInput, ModelChunk, Observer } from "../../models/language/model-chunk.ts";
import { norm } from "../../models/language/norm.ts";
import type { PipelineSegment } from "../../models/language/pipeline-segments.ts";
import type { Companion, Group, Pending } from "../../parallel/index.ts";
import { UserError } from "../../system/errors.ts";
import { axpby, copyInto, hiddenLoss, Tape, Tensor, TokenSlice } from "../../tensor/index.ts";
import type { HeadView, LanguageView, RecordedView } from "../guest.ts";
import type { HiddenPair, Point } from "./settings.ts";
import { type Teacher, teacherHidden } from "./teacher.ts";

/** A pair, and the chunks of its layers, counted over all stages. */
interface Placed extends HiddenPair {
	readonly at: number;
	readonly from: number;
}

/** Index of the segment of a model that has a point. */
export function segmentOf({ layer, norm }: Point, segments: readonly PipelineSegment[]): number {
	if (norm === "final") return segments.length - 1;
	return segments.findIndex(({ begin, end }) => begin <= layer && layer < end);
}

/** Throws a UserError if the model keeps no hidden states between layers that it recomputes together. */
export function requireKept(pairs: readonly HiddenPair[], { recompute, blocks }: HybridConfig): void {
	if (recompute?.granularity !== "full") return;
	const ends = new Set<number>([-1]);
	blocks.reduce((end, length) => {
		ends.add(end + length);
		return end + length;
	}, -1);
	const single = recompute.method !== "uniform" || recompute.layers === 1;
	const kept = ({ layer, norm }: Point) => norm === "final" || (single && ends.has(norm === null ? layer : layer - 1));
	if (pairs.every(({ student }) => kept(student))) return;
	throw new UserError(
		"intermediate_layer_pairs names hidden states inside of layers that recompute-granularity full recomputes together; recompute-num-layers 1 or selective keeps them.",
	);
}

/** Observes a model's chunk: calls `found` with the states at each point that the chunk has. */
function statesAt(
	points: readonly { readonly point: Point; readonly found: (states: Tensor) => void }[],
	{ segment, parts }: ModelChunk,
	tape: Tape,
	masks: ForwardInput["masks"],
): Observer {
	const nameOf = ({ layer, norm }: Point) => {
		if (norm === "final") return "final_norm";
		if (norm === "input") return layer === segment.begin ? "entered" : `layer.${layer - 1}`;
		return `layer.${layer}`;
	};
	return (observed, value) => {
		const name = observed === "embedding" ? "entered" : observed;
		for (const { point, found } of points) {
			if (nameOf(point) !== name) continue;
			if (point.norm !== "input") {
				found(value);
				continue;
			}
			const { config, parameter } = parts;
			const prefix = layerPrefix(point.layer);
			const [weight] = kinds[config.pattern[point.layer]!].parameters(config);
			const options = { mask: masks?.norm ?? null, columns: masks?.hidden ?? null };
			const weights = (end: string) => parameter(prefix + end);
			using normed = norm(tape, { config, weights }, value, weight!.name, options);
			found(normed);
		}
	};
}

/** Sums over a microbatch's loss tokens. */
export interface Sums {
	readonly divergence: number;
	readonly labels: number;
	/** The mean of the pairs' losses. */
	readonly hidden: number;
	readonly tokens: number;
}

/** The pairs of a student's chunks on one rank. */
export class HiddenPairs {
	readonly placed: readonly Placed[];
	/** Pairs whose teacher's states come from an earlier chunk than the student's, in the order of their companions. */
	readonly travelling: readonly Placed[];
	/** Stages before the last one that have pairs. */
	readonly waiting: readonly number[];
	#connected = false;

	/** `segments`: of the student and of the teacher, over all stages. */
	constructor(
		readonly teacher: Teacher,
		readonly stages: Group,
		segments: readonly PipelineSegment[],
		ofTeacher: readonly PipelineSegment[],
	) {
		this.placed = teacher.pairs.map((pair) => {
			const [at, from] = [segmentOf(pair.student, segments), segmentOf(pair.teacher, ofTeacher)];
			if (from <= at) return { ...pair, at, from };
			throw new UserError(
				"intermediate_layer_pairs has a layer of the student on an earlier pipeline stage than the teacher's; allowed is the same or a later one.",
			);
		});
		this.travelling = this.placed.filter(({ at, from }) => from < at);
		const holders = new Set(this.placed.map(({ at }) => at % stages.size));
		this.waiting = [...holders].filter((stage) => stage < stages.size - 1);
	}

	/** The teacher's states that travel, and behind them the losses so far. */
	get companions(): Companion[] {
		if (this.placed.length === 0) return [];
		const width = this.teacher.model.config.hiddenSize;
		return [...this.travelling.map(() => ({ width })), { width: 1, dtype: "f32" }];
	}

	/**
	 * Work of a step. `taught`: the microbatches that the teacher teaches, ascending, which are known when the step has begun.
	 * Collective over the stages in the first step.
	 */
	inStep(taught: () => readonly number[]): PairsInStep {
		this.#connect();
		return new PairsInStep(this, taught);
	}

	/** The first NCCL message between two ranks blocks both, so they exchange an empty one before those of a step. */
	#connect(): void {
		const { rank, size } = this.stages;
		if (this.#connected || this.waiting.length === 0) return;
		this.#connected = true;
		using nothing = Tensor.empty(this.teacher.model.device, [0]);
		if (rank === size - 1) for (const stage of this.waiting) this.stages.send(nothing, stage).wait();
		else if (this.waiting.includes(rank)) this.stages.receive(nothing, size - 1).wait();
	}
}

/** A step's microbatches and their pairs. */
export class PairsInStep implements Disposable {
	/** The teacher's states of the passes that have begun, by place and microbatch. */
	readonly #states = new Map<string, ReadonlyMap<Placed, Tensor>>();
	/** Factors of the pairs' gradients by microbatch. */
	readonly #factors = new Map<number, number>();
	#received = 0;
	readonly #sent: { readonly values: Tensor; readonly pending: Pending }[] = [];

	constructor(
		private readonly all: HiddenPairs,
		private readonly taught: () => readonly number[],
	) {}

	/** Runs the teacher before a chunk. Its hidden states, and the companions of the pairs. */
	beforeChunk(view: LanguageView): Tensor[] {
		const { teacher, placed, travelling } = this.all;
		const { device, chunks, config } = teacher.model;
		const [entered = null, ...came] = view.companions;
		const index = this.#indexOf(view);
		const states = new Map(travelling.flatMap((pair, at) => (came[at] && pair.from < index ? [[pair, came[at]]] : [])));
		const points = placed
			.filter(({ from }) => from === index)
			.map((pair) => ({
				point: pair.teacher,
				found: (value: Tensor) => void states.set(pair, view.own(value.share())),
			}));
		const tape = new Tape(device, { recording: false });
		const observe = points.length === 0 ? undefined : statesAt(points, chunks[view.place]!, tape, undefined);
		const hidden = teacherHidden(teacher, view.place, view.input, entered, observe);
		if (placed.length === 0) return [hidden];
		this.#states.set(`${view.place} ${view.microbatch}`, states);
		const rows = this.#ownTokens(view).count;
		const sent = travelling.map(
			(pair) => states.get(pair)?.share() ?? Tensor.zeros(device, [rows, config.hiddenSize], config.dtype),
		);
		const losses = Tensor.zeros(device, [rows, 1]);
		if (came.length > 0) copyInto(came.at(-1)!, losses);
		return [hidden, ...sent, losses];
	}

	/** Records the losses of a chunk's pairs, and adds them to those that travel. */
	observer(view: RecordedView): Observer | null {
		const { placed, teacher } = this.all;
		const index = this.#indexOf(view);
		const own = placed.filter(({ at }) => at === index);
		const key = `${view.place} ${view.microbatch}`;
		const states = this.#states.get(key);
		this.#states.delete(key);
		if (own.length === 0) return null;
		const losses = view.companions.at(-1)!;
		const share = 1 / placed.length;
		const each = (share * view.weight) / Math.max(1, lossTokens(view.text));
		const weights = view.own(
			Tensor.from(
				teacher.model.device,
				this.#ownMask(view).map((counts) => counts * each),
			),
		);
		const points = own.map((pair) => ({
			point: pair.student,
			found: (value: Tensor) => {
				const factor = () => this.#factorOf(view.microbatch);
				using loss = hiddenLoss(view.tape, value, states!.get(pair)!, { kind: pair.loss, factor });
				loss.gradient?.accumulate(weights.share());
				using column = loss.view([loss.elements, 1]);
				axpby(column, losses, share, 1);
			},
		}));
		return statesAt(points, view.chunk, view.tape, view.forward.masks);
	}

	/** Sums of a microbatch's losses_T: of the divergence, of the labels, and of the pairs, which came as the last companion. */
	sums(view: HeadView, divergence: Tensor, labels: Tensor): Sums {
		const { teacher, placed } = this.all;
		const { device, parallel } = teacher.model;
		using totals = Tensor.zeros(device, [3], "f64");
		using counts = Tensor.zeros(device, [3], "f64");
		const add = (at: number, x: Tensor, mask: Tensor) => {
			using sum = totals.columns(at, 1);
			using count = counts.columns(at, 1);
			device.run("masked_sum", { x, mask, sum, count, elements: x.elements });
		};
		add(0, divergence, view.input.mask);
		add(1, labels, view.input.mask);
		if (placed.length > 0) {
			using mask = Tensor.from(device, this.#ownMask(view));
			add(2, view.companions.at(-1)!, mask);
			using sum = totals.columns(2, 1);
			parallel.tp.allReduce(sum).wait();
		}
		const values = new Float64Array(3);
		device.copyToHost(values, totals);
		return { divergence: values[0]!, labels: values[1]!, hidden: values[2]!, tokens: lossTokens(view.text) };
	}

	/** Says what the pairs' gradients of a microbatch are multiplied by. On the last stage. */
	weigh(microbatch: number, factor: number): void {
		this.#factors.set(microbatch, factor);
		const { stages, waiting, teacher } = this.all;
		for (const stage of waiting) {
			const values = Tensor.from(teacher.model.device, Float32Array.of(factor));
			this.#sent.push({ values, pending: stages.send(values, stage) });
		}
	}

	/** Takes what is left of the step's messages. */
	settle(): void {
		for (const { pending } of this.#sent) pending.wait();
		const { stages, waiting } = this.all;
		if (waiting.includes(stages.rank)) while (this.#received < this.taught().length) this.#receive();
	}

	#factorOf(microbatch: number): number {
		while (!this.#factors.has(microbatch)) this.#receive();
		return this.#factors.get(microbatch)!;
	}

	/** The last stage sends the factors in the order of the microbatches, in which every chunk passes them. */
	#receive(): void {
		const { stages, teacher } = this.all;
		using value = Tensor.empty(teacher.model.device, [1]);
		stages.receive(value, stages.size - 1).wait();
		this.#factors.set(this.taught()[this.#received++]!, value.toFloat32()[0]!);
	}

	#indexOf({ place }: Pick<LanguageView, "place">): number {
		return place * this.all.stages.size + this.all.stages.rank;
	}

	#ownTokens({ text }: Pick<LanguageView, "text">): TokenSlice {
		return TokenSlice.of(0, text.ids.length).cut(this.all.teacher.model.parallel.tp);
	}

	#ownMask(view: Pick<LanguageView, "text">): Float32Array {
		const { first, count } = this.#ownTokens(view);
		return view.text.lossMask.slice(first, first + count);
	}

	[Symbol.dispose](): void {
		for (const { values } of this.#sent.splice(0)) values[Symbol.dispose]();
	}
}
