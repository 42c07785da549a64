/** Runs `mimo verify` on one layout of the small subject, whose ranks are processes. */
import { expect } from "bun:test";
import { namedTopology, parseLayout } from "../../../src/parallel/layout.ts";
import { World } from "../../../src/parallel/world.ts";
import { planOf } from "../../../src/parity/verify/samples.ts";
import type { LayoutReport } from "../../../src/parity/verify/verdict.ts";
import { VerifyFolder, verify } from "../../../src/parity/verify/verify.ts";
import { runRanks } from "../../parallel/ranks.ts";
import { testDevice } from "../../support.ts";
import { smallSubject } from "./subject.ts";

export class SmallRun implements Disposable {
	private constructor(
		private readonly alone: World,
		private readonly folder = new VerifyFolder(),
	) {}

	static async open(): Promise<SmallRun> {
		return new SmallRun(World.alone(await testDevice(1)));
	}

	/** The report of the layout for the small subject with these keys changed; `onReference`: called between the two. */
	async reportOf(
		layout: string,
		changes: Readonly<Record<string, unknown>>,
		onReference: () => void = () => {},
	): Promise<LayoutReport> {
		const subject = smallSubject(changes);
		const { reports } = await verify({
			subject,
			plans: [planOf(namedTopology(parseLayout(layout)), { ...subject, samples: subject.samples.length })],
			folder: this.folder.path,
			tolerance: 1e-5,
			alone: this.alone,
			onReference,
			launch: async ({ name, topology }) => {
				const args = [this.folder.path, name, JSON.stringify(changes)];
				const outcomes = await runRanks("../parity/verify/verify-rank.ts", topology.worldSize, args);
				for (const { exitCode, stderr } of outcomes) {
					expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
				}
				return 0;
			},
		});
		return reports[0]!;
	}

	[Symbol.dispose](): void {
		this.folder[Symbol.dispose]();
		this.alone.device[Symbol.dispose]();
	}
}
