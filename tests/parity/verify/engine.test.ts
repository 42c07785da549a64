/** The run that verify compares: a restart leaves nothing of earlier steps. */
import { expect, test } from "bun:test";
import { World } from "../../../src/parallel/world.ts";
import { openEngine } from "../../../src/parity/verify/engine.ts";
import { referencePlan } from "../../../src/parity/verify/reference.ts";
import { plainOrder } from "../../../src/parity/verify/subject.ts";
import { testDevice } from "../../support.ts";
import { smallSubject } from "./subject.ts";

test("steps after a restart equal the first steps bit for bit", async () => {
	using device = await testDevice(1);
	const subject = smallSubject();
	expect(subject.language.moe.expertBias).toBe(true);
	using engine = await openEngine(World.alone(device), referencePlan(subject), subject, { order: plainOrder });
	const steps = () => {
		engine.restart();
		return [engine.step(), engine.step()].map(({ loss, gradientNorm, balancing }) => ({
			loss,
			gradientNorm,
			balancing,
		}));
	};
	expect(steps()).toEqual(steps());
});
