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
  transaction.commit(); // there are no other requests, and the page may be left before this one has been answered
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
  });
}

export const all = () => run("readonly", (store) => store.getAll());
export const put = (conversation) => run("readwrite", (store) => store.put(conversation));
export const remove = (id) => run("readwrite", (store) => store.delete(id));

/** Read or, with a second argument, write a choice; an empty one is forgotten. */
export function choice(name, value) {
  if (value === undefined) return localStorage.getItem(name) ?? "";
  if (value === "") localStorage.removeItem(name);
  else localStorage.setItem(name, value);
  return value;
}
