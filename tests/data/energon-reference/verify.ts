/** Replays a folder of reference data of the Python package and names the first difference of every file. */
import { existsSync } from "node:fs";
import { join, resolve } from "node:path";
import { LocalStorage } from "../../../src/data/energon/storage/open.ts";
import type { Images } from "../../../src/native/images.ts";
import { UserError } from "../../../src/system/errors.ts";
import { type BehaviourFile, checkBehaviour } from "./corrupt.ts";
import { checkDecoding, type DecodeFile } from "./decoding.ts";
import { goldenFiles, type OrderFile, readGolden, type StateFile } from "./golden.ts";
import { replayOrder } from "./orders.ts";
import {
	checkInWorkers,
	checkSeeds,
	checkSharder,
	checkSliceOrders,
	checkSplitShard,
	checkWorkerDraws,
} from "./random.ts";
import {
	type GlobalFile,
	type RedistributionFile,
	type RefusalFile,
	replayGlobal,
	replayRedistribution,
	replayRefusals,
} from "./redistribution.ts";
import { energonSetting, type Setting } from "./setup.ts";
import { replayState } from "./states.ts";
import { notBuilt } from "./tasks.ts";

export interface Verdict {
	readonly file: string;
	/** The first difference; null: all are equal. */
	readonly difference: string | null;
}

type Check = (setting: Setting, file: never, name: string) => string | null;

const randomChecks: Readonly<Record<string, Check>> = {
	"seeds.json": (_, file) => checkSeeds(file),
	"in_workers.json": (_, file) => checkInWorkers(file),
	"worker_rng.json": (_, file) => checkWorkerDraws(file),
	"sharder.json": (_, file) => checkSharder(file),
	"split_shard.json": (_, file) => checkSplitShard(file),
	"slice_orders.json": (setting, file) => checkSliceOrders(setting, file),
};

/** The replay that a file of `states/` wants, by its content. */
function stateCheck(file: object): Check {
	if ("redistributed" in file) return (setting, content: RedistributionFile) => replayRedistribution(setting, content);
	if ("global_state" in file) return (setting, content: GlobalFile) => replayGlobal(setting, content);
	if ("cases" in file) return (setting, content: RefusalFile) => replayRefusals(setting, content);
	return (setting, content: StateFile, name) => replayState(setting, content, name);
}

/** Replays every file that `filter` lets through, in order. */
export function* verifyGolden(
	folder: string,
	images: Images,
	filter: (file: string) => boolean = () => true,
): Generator<Verdict> {
	const golden = resolve(folder);
	if (!existsSync(join(golden, "orders")))
		throw new UserError(`${folder} is not a folder of Energon reference data: it has no orders.`);
	const setting = energonSetting(new LocalStorage(), golden);
	const run = (name: string, check: (file: never) => string | null): Verdict => {
		try {
			return { file: name, difference: check(readGolden<never>(golden, name)) };
		} catch (error) {
			return { file: name, difference: `failed: ${(error as Error).message}` };
		}
	};
	for (const name of goldenFiles(golden, "rng").filter(filter)) {
		// Seeds of functions that draw.
		if (name === "rng/restore_seeds.json") continue;
		const check = randomChecks[name.replace("rng/", "")];
		yield run(name, (file) => (check ? check(setting, file, name) : "there is no check for this file"));
	}
	const isBuilt = (name: string) => {
		const { parameters } = readGolden<Partial<OrderFile>>(golden, name);
		return !notBuilt.includes(parameters?.task_encoder ?? "");
	};
	for (const name of goldenFiles(golden, "orders").filter(filter).filter(isBuilt)) {
		yield run(name, (file: OrderFile) => replayOrder(setting, file));
	}
	for (const name of goldenFiles(golden, "states").filter(filter).filter(isBuilt)) {
		yield run(name, (file) => stateCheck(file)(setting, file, name));
	}
	const rest: Readonly<Record<string, Check>> = {
		"decode.json": (_, file: DecodeFile) => checkDecoding(setting, images, file),
		"datasets/corrupt/behaviour.json": (_, file: BehaviourFile) => checkBehaviour(setting, images, file),
	};
	for (const [name, check] of Object.entries(rest)) {
		if (existsSync(join(golden, name)) && filter(name)) yield run(name, (file) => check(setting, file, name));
	}
}
