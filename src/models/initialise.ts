/**
 * Initial values from a counter-based generator keyed by (seed, full parameter name) with the element's index in the
 * unsharded tensor as counter: no layout changes the initial model.
 */
import { Distribution } from "../native/abi.ts";
import type { Device } from "../native/device.ts";
import { copyInto, Tensor } from "../tensor/index.ts";
import type { Initialisation } from "./parameter-spec.ts";

/** Philox key of a name: the first 64 bits of SHA-256("seed:name"). */
export function philoxKey(seed: number, name: string): bigint {
	const digest = new Bun.CryptoHasher("sha256").update(`${seed}:${name}`).digest();
	return digest.readBigInt64LE(0);
}

/** A block of rows and columns of an unsharded tensor seen as [rows, fullWidth]. */
export interface Block {
	readonly firstRow: number;
	readonly rows: number;
	readonly firstColumn: number;
	readonly columns: number;
	readonly fullWidth: number;
}

/** Fills `target` ([block.rows, block.columns], contiguous for a constant) with the initial values of that block. */
export function initialise(
	device: Device,
	target: Tensor,
	initialisation: Initialisation,
	key: bigint,
	block: Block,
): void {
	if (initialisation.kind === "constant") {
		device.run("fill", { y: target, elements: target.elements, value: initialisation.value, dtype: target.dtypeCode });
		return;
	}
	using drawn = Tensor.empty(device, [block.rows, block.columns], "f32", "workspace");
	const normal = initialisation.kind === "normal";
	const [a, b] = normal ? [0, initialisation.standardDeviation] : uniformRange(initialisation);
	device.run("philox_fill", {
		y: drawn,
		rows: block.rows,
		width: block.columns,
		first_row: block.firstRow,
		first_column: block.firstColumn,
		full_width: block.fullWidth,
		seed: key,
		a,
		b,
		distribution: normal ? Distribution.normal : Distribution.uniform,
		dtype: drawn.dtypeCode,
	});
	const transform = hostTransform(initialisation);
	if (transform === null) {
		copyInto(drawn, target);
	} else {
		// On the host: these tensors have one value a head.
		using transformed = Tensor.from(device, drawn.toFloat32().map(transform), drawn.shape);
		copyInto(transformed, target);
	}
}

function uniformRange(initialisation: Exclude<Initialisation, { kind: "normal" | "constant" }>): [number, number] {
	switch (initialisation.kind) {
		case "inverse-softplus":
			return [Math.log(initialisation.low), Math.log(initialisation.high)];
		default:
			return [initialisation.low, initialisation.high];
	}
}

function hostTransform(initialisation: Initialisation): ((value: number) => number) | null {
	switch (initialisation.kind) {
		case "log-uniform":
			return Math.log;
		case "inverse-softplus":
			return (logStep) => {
				const step = Math.max(initialisation.floor, Math.exp(logStep));
				return step + Math.log(-Math.expm1(-step));
			};
		default:
			return null;
	}
}
