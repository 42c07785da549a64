/** A converted checkpoint is the checkpoint. */
import { Refused, Wrong } from "../case.ts";
import { requireClose, requireSame } from "../comparison.ts";
import type { Flags } from "../draw.ts";
import { refusal } from "../layout/grids.ts";
import { foreign, onGrids, plainArithmetic, published, publishedVision, tiling } from "../layout/options.ts";
import { hasEncoder } from "../model/vision.ts";
import { evaluated, readingOf, visionOf } from "./evaluated.ts";
import type { Relation } from "./relation.ts";

export const converted: Relation = {
	name: "converted",
	hold(draw, model, place) {
		const flags: Flags = { ...onGrids(draw, model), "train-iters": "3", "save-interval": "3", save: "own" };
		place.train("own", flags);
		const own = place.tensors("own");
		const format = draw.one(["torch_dist", "torch_dist", "hf", "native"]);
		place.mimo(["convert-ckpt", "--to", format, "own", "there", ...(draw.chance(0.3) ? ["--verify"] : [])]);
		place.mimo(["convert-ckpt", "--to", "native", "there", "back"]);
		requireSame(`tensors by ${format}`, ...comparable(flags, own, place.tensors("back"), format));
		if (Object.keys(plainArithmetic(flags)).length < Object.keys(flags).length) return "ok";
		const data = flags["data-path"]!;
		const expected = evaluated(place, ["--load", "own"], data);
		const found = evaluated(place, ["--load", "back"], data, { ...readingOf(flags), ...visionOf(flags) });
		requireClose(`the loss by ${format}`, expected.loss, found.loss, 1e-5);
		return "ok";
	},
};

/** The tensors of both sides that the format has a place for. */
function comparable(
	flags: Flags,
	own: Record<string, string>,
	back: Record<string, string>,
	format: string,
): [Record<string, string>, Record<string, string>] {
	const chosen = (keep: (name: string) => boolean) =>
		Object.fromEntries(Object.entries(own).filter(([name]) => keep(name)));
	if (format === "native") return [own, back];
	// Adapters are merged, which changes the weights below them.
	if ("lora-rank" in flags) return [{}, {}];
	if (format === "hf") return [chosen((name) => name in back), back];
	// The command says that the router of an elastic parent has no place in Megatron's format.
	return [chosen((name) => !name.includes("elastic_router")), back];
}

export const huggingFace: Relation = {
	name: "Hugging Face folders",
	hold(draw, model, place) {
		const kept = Object.fromEntries(Object.entries(model).filter(([key]) => !foreign.test(key) && !tiling.test(key)));
		const biased = "flextron" in kept ? { "moe-router-bias-update-rate": "0" } : {};
		const saving = { "train-iters": "3", "save-interval": "3", save: "own", "save-hf": "saved" };
		const flags = onGrids(draw, {
			...kept,
			...published,
			...(hasEncoder(kept) && publishedVision),
			...biased,
			...saving,
		});
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
		const data = flags["data-path"]!;
		const a = evaluated(place, ["--load", "own"], data).loss;
		// The folder says how images are sized.
		const unsaid = Object.entries(readingOf(flags)).filter(([key]) => !/^(img-|dynamic-resolution)/.test(key));
		const b = evaluated(place, ["--load-hf", "saved", "--bytes"], data, Object.fromEntries(unsaid)).loss;
		const limit = "bf16" in flags ? 1e-2 : 1e-5;
		if (!(Math.abs(a - b) <= limit * a)) throw new Wrong(`the saved folder's loss is ${b} instead of ${a}`);
		return "ok";
	},
};
