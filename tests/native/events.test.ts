/** Events of a stream measure the time of the work between them. */
import { expect, test } from "bun:test";
import { Tensor } from "../../src/tensor/tensor.ts";
import { testDevice } from "../support.ts";

test("the time between events is that of the work", async () => {
	using device = await testDevice();
	using x = Tensor.zeros(device, [1 << 22]);
	using before = device.createEvent();
	using between = device.createEvent();
	using after = device.createEvent();
	before.record(device.stream);
	for (let i = 0; i < 20; i++) device.setZero(x, x.elements * 4);
	between.record(device.stream);
	after.record(device.stream);
	device.synchronize();
	const [work, nothing] = [between.millisecondsSince(before), after.millisecondsSince(between)];
	// 335 MB at less than 10 TB/s.
	expect(work).toBeGreaterThan(0.03);
	expect(nothing).toBeWithin(0, work);
	expect(after.millisecondsSince(before)).toBeCloseTo(work + nothing, 2);
});
