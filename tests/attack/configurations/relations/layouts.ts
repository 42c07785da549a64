/** Layouts of ranks give what one process gives. */
import { type Case, Refused, Wrong } from "../case.ts";
import { requireNear } from "../comparison.ts";
import { argumentsOf, type Draw, type Flags, on } from "../draw.ts";
import { refusal } from "../layout/grids.ts";
import { onGrids, plainArithmetic, poolsMicrobatches, unpooled, verifiable, withGrids } from "../layout/options.ts";
import { hasEncoder } from "../model/vision.ts";
import type { Relation, Verdict } from "./relation.ts";

export const layouts: Relation = {
	name: "layouts",
	hold: agree,
};

/** Layouts of what few models have. */
export const layoutsOf: readonly Relation[] = [
	{ name: "layouts of elastic parents", emphasis: { elastic: 1, mtp: 0 }, hold: agree },
	{ name: "layouts of MTP depths", emphasis: { mtp: 1, elastic: 0, adapters: 0.1 }, hold: agree },
	{ name: "layouts of experts", emphasis: { experts: 0.8, perLayer: 0.4, fp8: 0.25, elastic: 0 }, hold: agree },
	{ name: "layouts of pictures", emphasis: { vision: 1, tiling: 0.3 }, hold: agree },
	{ name: "layouts of adapters", emphasis: { adapters: 1, elastic: 0 }, hold: agree },
];

function agree(draw: Draw, model: Flags, place: Case): Verdict {
	const teacher = draw.chance(0.06) && !("flextron" in model);
	const base: Flags = {
		...verifiable(model),
		"train-iters": "4",
		...(teacher && { "export-kd-teacher-load": "drawn", "export-kd-alpha": draw.one(["1", "0.3"]) }),
		...(teacher && hasEncoder(model) && { "freeze-vit": on, "freeze-projection": on }),
	};
	const samples = draw.chance(0.3) ? ["--samples", "data"] : [];
	const { flags, grids } = withGrids(draw, base, 2);
	if (grids.length === 0) throw new Refused(refusal(base) ?? "no grids");
	const list = grids.map(({ layout }) => layout).join(",");
	// The terms of some gradients, such as those of A_log, nearly cancel.
	const wide = ["--tolerance", "5e-5", "--json"];
	const said = place.mimo(["verify", ...argumentsOf(flags), "--layouts", list, ...samples, ...wide], [1]);
	const report = JSON.parse(said) as {
		readonly passed: boolean;
		readonly layouts: readonly {
			readonly layout: string;
			readonly failures: readonly string[];
			readonly result: { readonly clampFlips: { readonly count: number } } | null;
		}[];
	};
	const wrong = report.layouts.flatMap(({ layout, failures, result }) => {
		const tie = failures.some((failure) => /routing decisions? flip/.test(failure)) || result?.clampFlips.count;
		const unexplained = failures.filter((failure) => !/rounding alone changes it/.test(failure));
		return tie ? [] : unexplained.slice(0, 3).map((failure) => `${layout}: ${failure}`);
	});
	if (wrong.length > 0) throw new Wrong(wrong.join("; "));
	return report.passed ? "ok" : "tie";
}

export const batches: Relation = {
	name: "microbatches and lanes",
	suits: (flags) => !poolsMicrobatches(unpooled(flags)) && flags["data-path"]!.endsWith("text.txt"),
	hold(draw, model, place) {
		const flags = plainArithmetic({ ...unpooled(model), "micro-batch-size": "1" });
		const plain = place.train("plain", flags);
		const other = place.train(
			"other",
			plainArithmetic(onGrids(draw, { ...flags, "micro-batch-size": draw.one(["1", "2", "4"]) })),
		);
		return requireNear("other microbatches and grids", plain, other) ? "ok" : "tie";
	},
};
