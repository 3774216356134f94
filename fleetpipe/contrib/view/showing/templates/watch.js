// Puts in twice a second what has changed; a chart that is being read stays as it is.
const read = async () => {
  try {
    const answer = await fetch(location.href, {signal: AbortSignal.timeout(2000)});
    if (!answer.ok) throw new Error(answer.statusText);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    document.title = fresh.title;
    for (const node of document.querySelectorAll(".live")) {
      const next = fresh.getElementById(node.id);
      const isRead = node.id === "charts" && node.matches(":hover, :focus-within");
      if (!isRead && node.innerHTML !== next.innerHTML) {
        node.replaceChildren(...next.childNodes);
        if (node.id === "charts") begin();
      }
    }
  } catch {
    const words = document.querySelector("#answers dd");
    words.textContent = "nothing is heard of the job: it has ended, or cannot be reached";
    words.className = "bad";
  }
  setTimeout(read, 500);
};
for (const link of document.querySelectorAll("footer a")) link.search = location.search;
setTimeout(read, 500);
