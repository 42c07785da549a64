/** Reductions of numbers in host memory over ranks. */
import type { Device } from "../native/device.ts";
import type { Group, Reduction } from "../parallel/index.ts";
import { Tensor } from "../tensor/index.ts";

/** values = their reduction over `group`. Every rank of it calls this together. */
export function reduceHost(group: Group, device: Device, values: Float64Array, reduction: Reduction = "sum"): void {
	if (values.length === 0) return;
	using all = Tensor.from(device, values);
	group.allReduce(all, reduction).wait();
	device.copyToHost(values, all);
}
