// The panels of the page, in the order of their tabs. One that is not listed is not in the page.
import { change } from "./change.js";
import { look } from "./look.js";

/**
 * Each has `name`, its word in links and in `parameters(name, ...)`; `title`, on its tab; `View`, a component; and
 * `usesModel`, whether it is shown beside the module tree and the input of the chosen model.
 */
export const PANELS = [look, change];
