/** Runs of a family: in this process alone, and as a rank program's part of a layout. */
import { segmentLengths } from "../../../src/config/hybrid-pattern.ts";
import { elastic as elasticGuest } from "../../../src/guests/elastic/elastic.ts";
import { segmentsOf } from "../../../src/models/language/pipeline-segments.ts";
import type { Device } from "../../../src/native/device.ts";
import { languageAlone, namedTopology, parseLayout } from "../../../src/parallel/layout.ts";
import type { Topology } from "../../../src/parallel/topology.ts";
import { World } from "../../../src/parallel/world.ts";
import { assemble, type Run } from "../../../src/train/assemble.ts";
import type { RunSpecification } from "../../../src/train/run-specification.ts";
import { deviceOfRank, placeOfRank } from "../../parallel/ranks.ts";
import { type Family, familyOf, parentSeed } from "./family-model.ts";

type Changes = Partial<RunSpecification>;

/** The family's parent, drawn from parentSeed; all of it trains. */
export function openFamily({ model, elastic }: Family, device: Device, changes: Changes = {}): Promise<Run> {
	const { topology } = namedTopology(languageAlone);
	return initialised(
		{ language: model, guests: [elasticGuest({ config: elastic })], ...changes },
		topology,
		World.alone(device),
	);
}

async function initialised(
	specification: Changes & Pick<RunSpecification, "language">,
	topology: Topology,
	world: World,
): Promise<Run> {
	const run = await assemble(
		{
			...{ encoders: [], clipGrad: 0, seed: 1 },
			frozenLanguage: false,
			adam: { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 },
			...specification,
		},
		topology,
		world,
	);
	run.initialise(parentSeed);
	return run;
}

/** For rank programs: this rank's part of the family of `keys` on a layout. */
export class FamilyRank implements Disposable {
	private constructor(
		readonly family: Family,
		readonly device: Device,
		readonly world: World,
		readonly run: Run,
	) {}

	static async open(layout: string, keys: Readonly<Record<string, unknown>>, changes: Changes): Promise<FamilyRank> {
		const { topology } = namedTopology(parseLayout(layout));
		const { tensor, pipeline } = topology.language.shape;
		const family = familyOf({ ...keys, "llm-tp": tensor });
		const { c, model, elastic } = family;
		const place = await placeOfRank();
		const device = await deviceOfRank();
		const world = World.join(device, place.run, place.rank, place.backend);
		const segments = segmentsOf(segmentLengths(c.hybridLayerPattern, pipeline));
		const specification = { language: model, guests: [elasticGuest({ config: elastic })], segments, ...changes };
		return new FamilyRank(family, device, world, await initialised(specification, topology, world));
	}

	[Symbol.dispose](): void {
		for (const part of [this.run, this.world, this.device]) part[Symbol.dispose]();
	}
}
