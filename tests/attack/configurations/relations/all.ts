/**
 * What has to hold between runs of a drawn configuration: layouts give what one process gives, options that order work
 * change no value, a resumed run is the uninterrupted one, a converted checkpoint is the checkpoint.
 */
import { type Case, numbersOf, Refused, requireEqual, requireNear, Wrong } from "./configuration-case.ts";
import { hasEncoder } from "./configuration-data.ts";
import { argumentsOf, type Draw, type Flags } from "./configuration-draw.ts";
import { refusal } from "./configuration-grids.ts";
import {
	allowed,
	drawEquivalent,
	drawNeutral,
	foreign,
	onGrids,
	onGridsOf,
	plainArithmetic,
	poolsMicrobatches,
	published,
	unpooled,
	verifiable,
	withGrids,
} from "./configuration-options.ts";

export type Verdict = "ok" | "tie";

export interface Relation {
	readonly name: string;
	/** Whether a model and its grids have it. */
	readonly suits?: (flags: Flags) => boolean;
	/** `flags` name a model; the relation adds what it needs. Throws Refused or Wrong. */
	readonly hold: (draw: Draw, flags: Flags, place: Case) => Verdict;
}

const on = "true";

const layouts: Relation = {
	name: "layouts",
	hold(draw, model, place) {
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
			readonly layouts: readonly { readonly layout: string; readonly failures: readonly string[] }[];
		};
		if (report.passed) return "ok";
		const failures = report.layouts.flatMap((one) =>
			one.failures.slice(0, 3).map((failure) => `${one.layout}: ${failure}`),
		);
		if (failures.some((failure) => /routing decisions? flip/.test(failure))) return "tie";
		throw new Wrong(failures.join("; "));
	},
};

const neutral: Relation = {
	name: "neutral options",
	hold(draw, model, place) {
		const flags = onGrids(draw, model);
		let more: Flags = {};
		for (let attempt = 0; attempt < 10 && Object.keys(more).length === 0; attempt++) {
			more = allowed(flags, drawNeutral(draw, flags));
		}
		const plain = place.train("plain", flags);
		const other = place.train("other", { ...flags, ...more });
		const evaluated = "eval-iters" in more;
		requireEqual(argumentsOf(more).join(" "), plain, evaluated ? other.filter((step) => !("split" in step)) : other);
		if ("profile-step-start" in more) place.mimo(["trace", "summary", "trace.json"]);
		place.mimo(["report", "other.jsonl", "--output", "report.html"]);
		return "ok";
	},
};

const equivalent: Relation = {
	name: "equivalent options",
	hold(draw, model, place) {
		const flags = plainArithmetic(onGrids(draw, model));
		let more: Flags = {};
		for (let attempt = 0; attempt < 10 && Object.keys(more).length === 0; attempt++) {
			more = allowed(flags, drawEquivalent(draw, flags));
		}
		const plain = place.train("plain", flags);
		const other = place.train("other", { ...flags, ...more });
		return requireNear(argumentsOf(more).join(" "), plain, other) ? "ok" : "tie";
	},
};

const batches: Relation = {
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

/** Sometimes with a teacher of other weights. */
function taught(draw: Draw, model: Flags, place: Case): Flags {
	const kd: Flags = {
		...model,
		"export-kd-teacher-load": place.path("teacher"),
		"export-kd-alpha": draw.one(["1", "0.4"]),
		"export-kd-temperature": draw.one(["1", "2"]),
		...(hasEncoder(model) && { "freeze-vit": on, "freeze-projection": on }),
	};
	if (draw.chance(0.85) || "flextron" in model || refusal(kd) !== null) return model;
	place.train("teacher", { ...model, seed: "77", "train-iters": "3", "save-interval": "3", save: "teacher" });
	return kd;
}

const resumed: Relation = {
	name: "resumed",
	hold(draw, model, place) {
		const flags = {
			...onGrids(draw, taught(draw, model, place)),
			"train-iters": "4",
			"save-interval": "2",
			...draw.sometimes(0.3, () => ({ "eval-interval": "2", "eval-iters": "1" })),
		};
		const async = draw.sometimes(0.5, () => ({ "async-save": on }));
		const whole = place.train("whole", { ...flags, ...async, save: "whole" });
		const after = whole.filter(({ iteration }) => Number(iteration) > 2);
		if (draw.chance(0.5)) {
			const rest = place.train("rest", { ...flags, save: "rest", load: "whole", "ckpt-step": "2" });
			requireEqual("resumed at step 2", after, rest);
		} else {
			const again = { ...flags, ...async, save: "rest", load: "rest" };
			place.train("rest", { ...again, "exit-interval": "2" });
			requireEqual("stopped at step 2 and started again", whole, place.train("rest", again));
		}
		requireSame("the weights of the resumed run", place.tensors("whole"), place.tensors("rest"));
		return "ok";
	},
};

function requireSame(what: string, expected: Record<string, string>, found: Record<string, string>): void {
	const names = new Set([...Object.keys(expected), ...Object.keys(found)]);
	const different = [...names].filter((name) => expected[name] !== found[name]);
	if (different.length > 0) {
		throw new Wrong(
			`${what}: ${different.length} of ${names.size} tensors differ, such as ${different.slice(0, 3).join(", ")}`,
		);
	}
}

const resharded: Relation = {
	name: "resumed on other grids",
	suits: (flags) => !poolsMicrobatches(unpooled(flags)) && flags["data-path"]!.endsWith("text.txt"),
	hold(draw, model, place) {
		const flags: Flags = { ...plainArithmetic(unpooled(model)), "save-interval": "2" };
		const whole = place.train("whole", { ...plainArithmetic(onGrids(draw, flags)), save: "whole" });
		const rest = place.train("rest", {
			...plainArithmetic(onGrids(draw, flags)),
			save: "rest",
			load: "whole",
			"ckpt-step": "2",
		});
		const expected = whole.filter(({ iteration }) => Number(iteration) > 2);
		return requireNear("resumed at step 2 on other grids", expected, rest) ? "ok" : "tie";
	},
};

const converted: Relation = {
	name: "converted",
	hold(draw, model, place) {
		const flags = { ...onGrids(draw, model), "train-iters": "3", "save-interval": "3", save: "own" };
		place.train("own", flags);
		const own = place.tensors("own");
		const format = draw.one(["torch_dist", "torch_dist", "hf", "native"]);
		place.mimo(["convert-ckpt", "--to", format, "own", "there", ...(draw.chance(0.3) ? ["--verify"] : [])]);
		place.mimo(["convert-ckpt", "--to", "native", "there", "back"]);
		const back = place.tensors("back");
		if (format === "hf" || "lora-rank" in flags) {
			// Weights alone, of adapters the merged ones.
			if ("lora-rank" in flags) return "ok";
			const weights = Object.fromEntries(Object.entries(own).filter(([name]) => name in back));
			requireSame(`weights by ${format}`, weights, back);
		} else {
			// The command says that the router of an elastic parent has no place in Megatron's format.
			const kept =
				format === "native"
					? own
					: Object.fromEntries(Object.entries(own).filter(([name]) => !name.includes("elastic_router")));
			requireSame(`tensors by ${format}`, kept, back);
		}
		return "ok";
	},
};

const judged: Relation = {
	name: "evaluated and generated",
	hold(draw, model, place) {
		const flags: Flags = {
			...plainArithmetic(onGrids(draw, model)),
			"train-iters": "3",
			"save-interval": "3",
			save: "own",
		};
		place.train("own", flags);
		const data = flags["data-path"]!;
		const batch = ["--load", "own", "--device=cpu"];
		const grids = [{}, onGridsOf(draw, flags)];
		const losses = grids.map((some) =>
			numbersOf(
				JSON.parse(
					place.mimo(["evaluate", ...batch, "--data", data, "--samples", "1000", "--json", ...argumentsOf(some)]),
				),
			),
		);
		losses[0]!.forEach(([name, value], at) => {
			const other = losses[1]![at]?.[1];
			const near = other !== undefined && Math.abs(other - value) <= 1e-4 * Math.max(1e-6, Math.abs(value));
			if (!near)
				throw new Wrong(`evaluate: ${name} is ${other} instead of ${value} on ${argumentsOf(grids[1]!).join(" ")}`);
		});
		const answers = grids.map((some) =>
			place.mimo(["generate", ...batch, "--prompt", "In", "--max-new-tokens", "5", ...argumentsOf(some)]),
		);
		return answers[0] === answers[1] ? "ok" : "tie";
	},
};

const huggingFace: Relation = {
	name: "Hugging Face folders",
	suits: (flags) => !hasEncoder(flags),
	hold(draw, model, place) {
		const kept = Object.fromEntries(Object.entries(model).filter(([key]) => !foreign.test(key)));
		const biased = "flextron" in kept ? { "moe-router-bias-update-rate": "0" } : {};
		const saving = { "train-iters": "3", "save-interval": "3", save: "own", "save-hf": "saved" };
		const flags = onGrids(draw, { ...kept, ...published, ...biased, ...saving });
		const sentence = refusal(flags);
		if (sentence !== null) throw new Refused(sentence);
		place.train("own", flags);
		place.mimo(["convert-ckpt", "--to", "hf", "own", "converted"]);
		// Of a model in bf16 the command writes the fp32 masters.
		if (!("bf16" in flags)) {
			requireSame("save-hf and convert-ckpt", place.tensors("saved"), place.tensors("converted"));
		}
		place.mimo(["convert-ckpt", "--to", "native", "saved", "back"]);
		const [own, back] = [place.tensors("own"), place.tensors("back")];
		if (!("lora-rank" in flags) && !("bf16" in flags)) {
			requireSame(
				"weights there and back",
				Object.fromEntries(Object.entries(own).filter(([name]) => name in back)),
				back,
			);
		}
		// A folder does not say how its data were read.
		const reading = Object.entries(flags).filter(([key]) =>
			/^(seq-length|device|data-(begin|end|pad)-id|data-too-long)$/.test(key),
		);
		const data = ["--data", flags["data-path"]!, "--json", ...argumentsOf(Object.fromEntries(reading))];
		const losses = [
			["--load", "own"],
			["--load-hf", "saved", "--bytes"],
		].map((from) => numbersOf(JSON.parse(place.mimo(["evaluate", ...from, ...data]))));
		const [a, b] = losses.map((all) => all.find(([name]) => name.endsWith(" loss"))![1]) as [number, number];
		const limit = "bf16" in flags ? 1e-2 : 1e-5;
		if (!(Math.abs(a - b) <= limit * a)) throw new Wrong(`the saved folder's loss is ${b} instead of ${a}`);
		return "ok";
	},
};

const tools: Relation = {
	name: "planned and printed",
	hold(draw, model, place) {
		const flags = argumentsOf(onGrids(draw, model));
		place.mimo(["train", ...flags, "--print-config"]);
		place.mimo(["train", ...flags, "--print-topology"]);
		place.mimo(["train", ...flags, "--print-schedule"]);
		const plan = place.mimo(["plan", ...flags, "--json"]);
		for (const [name, value] of numbersOf(JSON.parse(plan))) {
			if (!Number.isFinite(value) || value < 0) throw new Wrong(`plan: ${name} is ${value}`);
		}
		return "ok";
	},
};

/** By weight. */
export const relations: readonly Relation[] = [
	layouts,
	layouts,
	layouts,
	neutral,
	neutral,
	neutral,
	equivalent,
	equivalent,
	batches,
	resumed,
	resumed,
	resharded,
	converted,
	converted,
	huggingFace,
	judged,
	tools,
];
