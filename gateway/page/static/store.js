// What the browser keeps: conversations in IndexedDB, a few choices in localStorage. Nothing leaves it from here.

const opened = new Promise((resolve, reject) => {
  const request = indexedDB.open("tritongate", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("conversations", { keyPath: "id" });
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

async function run(mode, work) {
  const transaction = (await opened).transaction("conversations", mode);
  const request = work(transaction.objectStore("conversations"));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
  });
}

/** End the transaction of its last request: the page may be left before that has been answered. */
function last(request) {
  request.transaction.commit();
  return request;
}

const tabs = new BroadcastChannel("tritongate"); // the page in other tabs
const versions = new WeakMap(); // conversation -> `updated` of what was kept of it when it was last read or written here

function known(conversation) {
  versions.set(conversation, conversation.updated);
  return conversation;
}

export const newId = () => crypto.randomUUID?.() ?? String(Date.now() + Math.random());

export const all = async () => (await run("readonly", (store) => store.getAll())).map(known);

export async function remove(id) {
  await run("readwrite", (store) => last(store.delete(id)));
  tabs.postMessage(id);
}

/** Keep a conversation. If another tab has written it since it was read here, it becomes another one; that tab's is returned. */
export async function put(conversation) {
  let theirs, written;
  await run("readwrite", (store) => {
    const request = store.get(conversation.id);
    request.onsuccess = () => {
      const kept = request.result;
      if (kept?.id === conversation.id && kept.updated !== versions.get(conversation)) {
        theirs = known(kept);
        conversation.id = newId();
      }
      written = conversation.updated;
      last(store.put(conversation));
    };
    return request;
  });
  versions.set(conversation, written);
  tabs.postMessage(conversation.id);
  return theirs;
}

/** Call `changed` with the id of each conversation that another tab has written or removed, and what is kept of it. */
export function follow(changed) {
  tabs.onmessage = async ({ data: id }) => {
    const theirs = await run("readonly", (store) => store.get(id));
    changed(id, theirs && known(theirs));
  };
}

const unkept = new Map(); // choices that the browser has no room for: this page has them until it is left

/** Read or, with a second argument, write a choice; an empty one is forgotten. */
export function choice(name, value) {
  if (value === undefined) return unkept.get(name) ?? localStorage.getItem(name) ?? "";
  unkept.delete(name);
  try {
    if (value === "") localStorage.removeItem(name);
    else localStorage.setItem(name, value);
  } catch {
    unkept.set(name, value);
  }
  return value;
}

/** Read or, with an argument, write which conversation this tab shows: a page that is loaded again goes on with it. */
export function place(id) {
  if (id !== undefined) sessionStorage.setItem("conversation", id);
  return sessionStorage.getItem("conversation");
}
