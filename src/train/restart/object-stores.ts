/** The object stores that a run's checkpoints come from and go to, each with its local copy on this host. */
import { type CheckpointStore, isStoreUrl, openStore } from "../../checkpoint/index.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { placeFromEnvironment } from "../../launch/place.ts";

type StoreKeys = Pick<TrainingConfiguration, "load" | "pretrainedCheckpoint" | "save" | "stagingDir">;

/** Those of the paths of a run that are URLs. */
export function storesOf({ load, pretrainedCheckpoint, save, stagingDir }: StoreKeys): CheckpointStore[] {
	const urls = [load, pretrainedCheckpoint, save].filter((path) => path !== null && isStoreUrl(path));
	return [...new Set(urls)].map((url) => openStore(url!, stagingDir));
}

/** The part of a host's work that this rank does. */
export function shareOfHost(): { readonly part: number; readonly parts: number } {
	const place = placeFromEnvironment();
	return { part: place?.localRank ?? 0, parts: place?.localSize ?? 1 };
}

/** Lists that this process has brought, by local folder. */
const brought = new Set<string>();

/** Brings the lists of checkpoints to this host; whether there was any that this process had not. */
export async function refreshStores(c: StoreKeys, { again = false } = {}): Promise<boolean> {
	const stores = storesOf(c).filter(({ folder }) => again || !brought.has(folder));
	for (const store of stores) {
		await store.refresh();
		brought.add(store.folder);
	}
	return stores.length > 0;
}
