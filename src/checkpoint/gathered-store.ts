/** The whole tensors of a module whose parts lie on several ranks, gathered to one of them. */
import type { LogicalTensor } from "../models/module-parameters.ts";
import type { Device } from "../native/device.ts";
import { exchangeTexts, type Group } from "../parallel/index.ts";
import { elementCount, Tensor } from "../tensor/index.ts";
import { copyBlocks, type NamedTensors } from "./model-store.ts";
import type { TensorStore, TensorType } from "./store.ts";

/**
 * Every rank of `group` calls this together; the first gets the store, the others null. `counts`: of equal copies of a
 * part, whether this rank's is the one to take. A rank may have no part of any. Values are fp32, in host memory.
 */
export function gatherTensors(
	path: string,
	module: NamedTensors,
	group: Group,
	device: Device,
	counts: (tensor: LogicalTensor) => boolean,
): TensorStore | null {
	const own = new Map([...module.logicalTensors()].map((tensor) => [tensor.name, tensor]));
	const shapes = [...own.values()].map(({ name, shape }) => [name, shape] as const);
	const lists = exchangeTexts(group, JSON.stringify(shapes)).map((text) => JSON.parse(text) as typeof shapes);
	const tensors = new Map<string, TensorType>();
	for (const [name, shape] of lists.flat()) tensors.set(name, { dtype: "F32", shape });
	const values = new Map<string, Float32Array>();
	try {
		for (const [name, { shape }] of tensors) {
			const full = new Float32Array(elementCount(shape));
			const part = own.get(name);
			if (part && counts(part)) {
				copyBlocks(
					part.value.toFloat32(),
					part.value.width,
					full,
					elementCount(shape.slice(1)),
					part.blocks,
					"to full",
				);
			}
			const whole = sum(full, device, group);
			if (group.rank === 0) values.set(name, whole);
		}
	} finally {
		for (const { value, gradient } of own.values()) {
			value[Symbol.dispose]();
			gradient?.[Symbol.dispose]();
		}
	}
	if (group.rank !== 0) return null;
	return {
		path,
		tensors,
		readInto: (name, offset, into) => {
			const { buffer, byteOffset } = values.get(name)!;
			into.set(new Uint8Array(buffer, byteOffset + offset, into.byteLength));
		},
		[Symbol.dispose]: () => values.clear(),
	};
}

/** Parts do not overlap and the rest is zero: the sum is the whole. */
function sum(values: Float32Array, device: Device, group: Group): Float32Array {
	using all = Tensor.from(device, values);
	group.allReduce(all).wait();
	return all.toFloat32();
}

/** Whether a rank's part counts: of replicas, and of ranks that hold the same whole tensor, the first does. */
export function firstCopyCounts(ranks: {
	readonly dense: Group;
	readonly expert: Group;
	readonly tensor: Group;
}): (tensor: LogicalTensor) => boolean {
	return ({ name, shape, blocks }) => {
		const expert = name.includes(".experts.");
		const held = blocks.reduce((elements, { rows, columns }) => elements + rows * columns, 0);
		const first = (expert ? ranks.expert : ranks.dense).rank === 0;
		return first && (expert || held < elementCount(shape) || ranks.tensor.rank === 0);
	};
}
