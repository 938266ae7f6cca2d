// Pages by address. Each is loaded when it is first visited.

/**
 * @typedef {object} Route
 * @property {string} pattern
 * @property {() => Promise<any>} load gives the page's component
 * @property {{label: string, icon: string, when?: (me: import("./store.js").Me) => boolean}} [nav] its entry in the bar
 */

const forAdmins = (/** @type {import("./store.js").Me} */ me) => me.role === "admin";

/** @type {Route[]} */
export const ROUTES = [
  { pattern: "/", load: async () => (await import("./pages/home.js")).Home, nav: { label: "Work", icon: "layers" } },
  { pattern: "/work/:id", load: async () => (await import("./pages/work.js")).Work },
  { pattern: "/new", load: async () => (await import("./pages/new.js")).NewJob },
  { pattern: "/pending", load: async () => (await import("./pages/pending.js")).PendingPage, nav: { label: "Pending", icon: "hourglass", when: (me) => me.pendingDashboard } },
  { pattern: "/sessions", load: async () => (await import("./pages/sessions.js")).Sessions, nav: { label: "Sessions", icon: "messages-square" } },
  { pattern: "/sessions/:name", load: async () => (await import("./pages/session.js")).SessionPage },
  { pattern: "/workers", load: async () => (await import("./pages/workers.js")).Workers, nav: { label: "Workers", icon: "cpu", when: forAdmins } },
  { pattern: "/providers", load: async () => (await import("./pages/providers.js")).Providers, nav: { label: "Providers", icon: "plug", when: forAdmins } },
  { pattern: "/webhooks", load: async () => (await import("./pages/webhooks.js")).Webhooks, nav: { label: "Webhooks", icon: "webhook" } },
  { pattern: "/keys", load: async () => (await import("./pages/keys.js")).Keys, nav: { label: "Keys", icon: "key-round", when: forAdmins } },
  { pattern: "/sign-in", load: async () => (await import("./pages/sign_in.js")).SignIn },
];
