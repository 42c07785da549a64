/** A run's configuration with a submodel in the place of its model. */
import { configurationOf, type ResolvedConfiguration } from "../../../config/resolve.ts";
import { type Key, keys, propertyOf } from "../../../config/schema.ts";
import { submodelKeys } from "./configuration.ts";
import type { Submodel } from "./submodel.ts";

/** Sizes that follow from others unless they are given: the submodel has the parent's. */
const kept: readonly Key[] = [
	"kv-channels",
	"ffn-hidden-size",
	"num-query-groups",
	"num-attention-heads",
	"mamba-num-heads",
	"num-experts",
	"moe-ffn-hidden-size",
];

/** Throws a UserError where the layout does not divide the submodel's sizes. */
export function configurationOfSubmodel(resolved: ResolvedConfiguration, submodel: Submodel): ResolvedConfiguration {
	const { configuration: c } = resolved;
	const own: Readonly<Record<string, unknown>> = { ...c, ...submodelKeys(c, submodel) };
	const configuration = configurationOf(Object.fromEntries(keys.map((key) => [key, own[propertyOf(key)]])), {
		trains: false,
	});
	const changed = keys.filter((key) => kept.includes(key) || !Bun.deepEquals(own[propertyOf(key)], c[propertyOf(key)]));
	const origins = Object.fromEntries(changed.map((key) => [key, { source: "program" } as const]));
	return { ...resolved, configuration, origins: { ...resolved.origins, ...origins } };
}
