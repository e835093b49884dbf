// Shows what the address names, or what is worth the first look.
const asked = decodeURIComponent(location.hash.slice(1));
select(byId.has(asked) ? asked : data.first);
