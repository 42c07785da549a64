/** Layers of the language model and what they are made of, but for experts. */
import { type Draw, type Flags, on } from "../draw.ts";

/** Layers, of which the share `experts` has experts. */
export function drawPattern(draw: Draw, experts: number): string {
	const layers = Array.from({ length: draw.whole(2, 6) }, () =>
		draw.chance(experts) ? "E" : draw.one([..."MMM**--"]),
	);
	if (draw.chance(0.2)) return grouped(draw, layers);
	if (draw.chance(0.4)) {
		// An empty segment is allowed.
		for (let cuts = draw.one([1, 1, 3]); cuts > 0; cuts--) layers.splice(draw.whole(0, layers.length), 0, "|");
	}
	return layers.join("");
}

/** The layers with some of them in brackets, of which E can be the last alone. */
function grouped(draw: Draw, layers: readonly string[]): string {
	const pieces: string[] = [];
	for (let at = 0; at < layers.length; ) {
		const wanted = draw.whole(1, 3);
		const expert = layers.slice(at, at + wanted).indexOf("E");
		const length = Math.min(expert < 0 ? wanted : expert + 1, layers.length - at);
		const block = layers.slice(at, at + length).join("");
		pieces.push(length === 1 ? block : `[${block}]`);
		at += length;
	}
	return pieces.join(draw.chance(0.3) ? "|" : "");
}

export function drawMtp(draw: Draw): Flags {
	return {
		"mtp-loss-scaling-factor": draw.one(["0.1", "0.5"]),
		...draw.sometimes(0.4, () => ({ "mtp-use-repeated-layer": on })),
	};
}

export function drawActivation(draw: Draw): Flags {
	const clamp = () => draw.sometimes(0.3, () => ({ "activation-func-clamp-value": draw.one(["0.05", "0.5", "7"]) }));
	switch (draw.whole(0, 4)) {
		case 0:
			return {};
		case 1:
			return { "squared-relu": on };
		case 2:
			return {
				"quick-geglu": on,
				...clamp(),
				...draw.sometimes(0.5, () => ({ "glu-linear-offset": draw.one(["1", "-0.5"]) })),
			};
		default:
			return { swiglu: on, ...clamp() };
	}
}

export function drawAttention(draw: Draw): Flags {
	const groups = draw.one([1, 2, 2, 2, 4]);
	const rope = (): Flags => ({
		"position-embedding-type": "rope",
		"rotary-base": draw.one(["10000", "500"]),
		"rotary-percent": draw.one(["1", "0.5", "0.25"]),
	});
	return {
		"num-query-groups": String(groups),
		"num-attention-heads": String(groups * draw.whole(1, 3)),
		"kv-channels": draw.one(["4", "8", "8", "16", "6", "5", "24"]),
		...draw.sometimes(0.4, rope),
	};
}

export function drawMamba(draw: Draw): Flags {
	const groups = draw.one([1, 2, 2, 2, 4]);
	return {
		"mamba-num-groups": String(groups),
		"mamba-num-heads": String(groups * draw.whole(1, 3)),
		"mamba-head-dim": draw.one(["4", "8", "16", "5"]),
		"mamba-state-dim": draw.one(["4", "8", "16", "7"]),
		"mamba-conv-kernel-dim": draw.one(["4", "4", "2", "3", "1", "5"]),
		"mamba-chunk-size": draw.one(["4", "8", "5", "128"]),
	};
}
