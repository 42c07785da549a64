/**
 * `mimo verify --policy`: measures the effect of encoder-grad-participation `corrected` on a step. If only some encoder ranks saw
 * images it multiplies the encoder's gradient by ranks / participants; `exact` leaves the gradient of the mean loss.
 */
import { languageModelPrefix } from "../../models/language/layer-numbering.ts";
import { columns } from "../../observe/output.ts";
import type { World } from "../../parallel/index.ts";
import { reduceHost } from "../probe-sums.ts";
import { type Engine, openEngine } from "./engine.ts";
import type { Plan } from "./samples.ts";
import type { Subject } from "./subject.ts";

/** Norms of one step's gradients, before clipping, and the factor that clipping multiplies them by. */
interface Norms {
	readonly encoder: number;
	readonly language: number;
	readonly all: number;
	readonly clipFactor: number;
}

export interface PolicyResult {
	/** Data-parallel ranks of the encoder, and how many of them saw an image. */
	readonly ranks: number;
	readonly participants: number;
	readonly exact: Norms;
	readonly corrected: Norms;
	/** Cosine of the angle between both gradients of all parameters. */
	readonly cosine: number;
	/** Root mean square of the difference of the weights after the step over that of the step, encoder alone. */
	readonly weights: number;
}

/** Every rank of the layout calls this together; all get the result. */
export async function runPolicy(world: World, plan: Plan, subject: Subject): Promise<PolicyResult> {
	using exact = await openEngine(world, plan, subject);
	using corrected = await openEngine(world, plan, subject, { participation: "corrected" });
	const before = trainOnce(exact);
	const after = trainOnce(corrected);
	// Σ over counted elements: encoder and language squares of both, their products, weights' differences, steps.
	const sums = new Float64Array(7);
	before.parts.forEach((one, at) => {
		const two = after.parts[at]!;
		if (!one.counted) return;
		const side = one.encoder ? 0 : 1;
		one.gradient.forEach((x, i) => {
			const y = two.gradient[i]!;
			sums[side]! += x * x;
			sums[2 + side]! += y * y;
			sums[4]! += x * y;
		});
		if (!one.encoder) return;
		one.stepped.forEach((x, i) => {
			sums[5]! += (x - two.stepped[i]!) ** 2;
			sums[6]! += (x - one.initial[i]!) ** 2;
		});
	});
	reduceHost(exact.world, exact.state.scalars.device, sums);
	const [encoder, language, correctedEncoder, correctedLanguage, product, change, step] = sums as unknown as number[];
	const norms = (ofEncoder: number, ofLanguage: number, clipFactor: number): Norms => ({
		encoder: Math.sqrt(ofEncoder),
		language: Math.sqrt(ofLanguage),
		all: Math.sqrt(ofEncoder + ofLanguage),
		clipFactor,
	});
	const results = {
		exact: norms(encoder!, language!, before.clipFactor),
		corrected: norms(correctedEncoder!, correctedLanguage!, after.clipFactor),
	};
	return {
		ranks: plan.topology.encoders[0]?.lanes ?? 1,
		participants: before.participants,
		...results,
		cosine: product! / Math.max(results.exact.all * results.corrected.all, Number.MIN_VALUE),
		weights: Math.sqrt(change! / Math.max(step!, Number.MIN_VALUE)),
	};
}

interface Part {
	readonly counted: boolean;
	readonly encoder: boolean;
	readonly gradient: Float32Array;
	readonly initial: Float32Array;
	stepped: Float32Array;
}

function trainOnce(engine: Engine) {
	engine.restart();
	const parts: Part[] = [];
	const { participation } = engine.step(() => {
		for (const tensor of engine.tensors()) {
			const { name, value, gradient } = tensor;
			if (gradient) {
				parts.push({
					counted: engine.counts(tensor),
					encoder: !name.startsWith(languageModelPrefix),
					gradient: gradient.toFloat32(),
					initial: value.toFloat32(),
					stepped: new Float32Array(0),
				});
				gradient[Symbol.dispose]();
			}
			value[Symbol.dispose]();
		}
	});
	let at = 0;
	for (const { value, gradient } of engine.tensors()) {
		if (gradient) parts[at++]!.stepped = value.toFloat32();
		value[Symbol.dispose]();
		gradient?.[Symbol.dispose]();
	}
	return { parts, clipFactor: engine.state.scalars.read().clipFactor, participants: participation!.participants };
}

export interface PolicyReport {
	readonly layout: string;
	/** null: the run failed. */
	readonly result: PolicyResult | null;
}

export function renderPolicy(reports: readonly PolicyReport[]): string {
	const header = [
		"layout",
		"encoder ranks with images",
		"factor",
		"encoder norm exact → corrected",
		"all",
		"clip factor",
		"cosine",
		"encoder's step changed by",
	];
	const rows = reports.map(({ layout, result }) => {
		if (result === null) return [layout, "FAILED"];
		const { exact, corrected } = result;
		const both = (read: (norms: Norms) => number) => `${read(exact).toFixed(5)} → ${read(corrected).toFixed(5)}`;
		return [
			layout,
			`${result.participants} of ${result.ranks}`,
			(exact.encoder === 0 ? 1 : corrected.encoder / exact.encoder).toFixed(4),
			both(({ encoder }) => encoder),
			both(({ all }) => all),
			both(({ clipFactor }) => clipFactor),
			result.cosine.toFixed(6),
			`${(100 * result.weights).toFixed(2)} %`,
		];
	});
	const widest = header.length;
	return [
		...columns([header, ...rows.map((row) => [...row, ...new Array<string>(widest - row.length).fill("")])]),
		"exact is the gradient of the mean loss in every layout; corrected multiplies the encoder's by ranks / ranks with images.",
	].join("\n");
}
