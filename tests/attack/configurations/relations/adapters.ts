/** Adapters beside their base, merged into it and taken out again are one model. */
import { Refused } from "../case.ts";
import { requireClose, requireSame } from "../comparison.ts";
import { refusal } from "../layout/grids.ts";
import { foreign, onGrids, onGridsOf, plainArithmetic, published } from "../layout/options.ts";
import { hasEncoder } from "../model/vision.ts";
import { evaluated, readingOf } from "./evaluated.ts";
import type { Relation } from "./relation.ts";

export const adapted: Relation = {
	name: "adapters",
	emphasis: { adapters: 1, elastic: 0, vision: 0, perLayer: 0, fp8: 0, mtp: 0.1 },
	suits: (flags) => "lora-rank" in flags && !hasEncoder(flags),
	hold(draw, model, place) {
		const kept = Object.fromEntries(Object.entries(model).filter(([key]) => !foreign.test(key)));
		const own = plainArithmetic({ ...kept, ...published, "train-iters": "3", "save-interval": "3" });
		const base = Object.fromEntries(Object.entries(own).filter(([key]) => !key.startsWith("lora-")));
		const flags = plainArithmetic(
			onGrids(draw, { ...own, "load-hf": "base-hf", save: "own", "save-hf": "merged", "save-peft": "peft" }),
		);
		const sentence = refusal({ ...flags, "load-hf": "" }) ?? null;
		if (sentence !== null && !sentence.includes("load-hf")) throw new Refused(sentence);
		place.train("base", plainArithmetic(onGrids(draw, { ...base, save: "base" })));
		place.mimo(["convert-ckpt", "--to=hf", "base", "base-hf"]);
		place.train("own", flags);
		place.mimo(["convert-ckpt", "--to=hf", "own", "converted"]);
		place.mimo(["convert-ckpt", "--to=peft", "own", "converted-peft"]);
		place.mimo(["convert-ckpt", "--to=hf", "--adapters=peft", "base-hf", "from-peft"]);
		const merged = place.tensors("merged");
		requireSame("save-hf and convert-ckpt --to hf", merged, place.tensors("converted"));
		requireSame("save-hf and convert-ckpt --adapters", merged, place.tensors("from-peft"));
		const data = flags["data-path"]!;
		const reading = readingOf(flags);
		const expected = evaluated(place, ["--load", "own"], data);
		const found = evaluated(place, ["--load-hf", "merged", "--bytes"], data, reading);
		requireClose("the loss of the merged model", expected.loss, found.loss, 1e-5);
		const other = evaluated(place, ["--load", "own"], data, onGridsOf(draw, flags));
		requireClose("the loss with adapters on other grids", expected.loss, other.loss);
		const still = { "load-peft": "peft", "train-iters": "1", lr: "0", "min-lr": "0", "save-interval": "1" };
		const { "save-hf": _, "lr-warmup-iters": __, ...same } = flags;
		place.train("again", { ...same, ...still, save: "again", "save-peft": "peft-again" });
		const digest = (folder: string) => place.digest(`${folder}/adapter_model.safetensors`);
		requireSame("save-peft and convert-ckpt --to peft", digest("peft"), digest("converted-peft"));
		requireSame("adapters read and written", digest("peft"), digest("peft-again"));
		return "ok";
	},
};
