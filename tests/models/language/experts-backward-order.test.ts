/** Experts compute their weight gradients while the gradients of their rows are on the way back to the tokens' ranks. */
import { expect, spyOn, test } from "bun:test";
import { DeviceInput } from "../../../src/data/device-input.ts";
import { HybridModel } from "../../../src/models/language/model.ts";
import { type Group, groupOfOne } from "../../../src/parallel/group.ts";
import { noModelParallel } from "../../../src/parallel/module-groups.ts";
import { TokenSlice } from "../../../src/tensor/sequences.ts";
import { Tape } from "../../../src/tensor/tape.ts";
import { Tensor } from "../../../src/tensor/tensor.ts";
import { randomValues, testDevice } from "../../support.ts";
import { tiny } from "../../train/training.ts";

for (const fused of ["on", "off"]) {
	test(`moe-fused-mlp ${fused}`, async () => {
		using device = await testDevice();
		const config = tiny({ "hybrid-layer-pattern": "E", "moe-fused-mlp": fused });
		const events: string[] = [];
		const alone = groupOfOne("language.tp_ep", 0);
		/** A group of one whose rows travel until they are waited for. */
		const group: Group = {
			...alone,
			exchangeRows: (send, receive) => {
				events.push("leave");
				device.copy(receive.rows, send.rows, send.rows.bytes);
				if (send.beside) device.copy(receive.beside!, send.beside, send.beside.bytes);
				return { wait: () => void events.push("arrive") };
			},
		};
		const experts = { group, dispatcher: "alltoall", expertTensor: 1, localExperts: config.moe.experts } as const;
		const capacity = { bound: null, mostTokens: null };
		const parallel = { ...noModelParallel("language", 0), experts: { ...experts, capacity } };
		using model = new HybridModel(device, config, { frozen: false, parallel });
		model.initialise(3);
		const tokens = 10;
		const text = { ids: new Int32Array(tokens).map((_, t) => 3 * t), labels: new Int32Array(tokens) };
		using input = new DeviceInput(device, { ...text, lossMask: new Float32Array(tokens), lengths: [tokens] }, parallel);
		const tape = new Tape(device, { recording: true });
		using logits = model.chunks[0]!.forward(tape, input.forward(0, TokenSlice.of(0, tokens)), null);
		expect(events).toEqual(["leave", "arrive", "leave", "arrive"]);
		const run = device.run.bind(device);
		const spy = spyOn(device, "run").mockImplementation((name, args) => {
			if (name.startsWith("grouped_") && name.endsWith("weight_gradient")) events.push(name);
			run(name, args);
		});
		try {
			logits.gradient!.accumulate(Tensor.from(device, randomValues(logits.elements, 1), logits.shape));
			tape.backward();
		} finally {
			spy.mockRestore();
		}
		const gradient = "grouped_gemm_weight_gradient";
		expect(events.slice(4)).toEqual(["leave", "arrive", "leave", gradient, gradient, "arrive"]);
	});
}
