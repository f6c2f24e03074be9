-- Divides the slots of pools among the gateway processes that ask for them, as one step. Called by capacity.py (EVALSHA).
--
-- A pool is a hash: field "<process>" = "<slots held>;<end in ms>;<requests running>;<when it last had a slot, in ms>;
-- <priority>:<requests>,…", the last being what it runs and has waiting.
-- Nobody may hold what another one still holds: the sum never exceeds the capacity that the asking process sees. Who
-- holds more than its part is told so, keeps to it as its requests end, and says so with its next call: until its reply
-- it may use what it had, so that much stays held.
-- A dead process's slots come back when its field ends. All keys carry the hash tag {poolgate}; all have a TTL.
--
-- KEYS: pools. ARGV[1]: JSON {process, hold_ms, pools: [{capacity, running, had, asks: [[priority, requests]]}]}, in KEYS' order;
--   `had`: slots that it may use until the reply;
--   a pool without asks and running is let go.
-- Reply per pool: {slots of this process, processes that ask, 1 if that is less than it asked for}.

local HEADROOM = 4  -- 1/HEADROOM of what nobody asks for is spread over the processes, so that few requests have to ask

local clock = redis.call('TIME')
local now_ms = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)
local ask = cjson.decode(ARGV[1])

local function integer(number)
  return string.format('%.0f', number)
end

local function read(key)
  local found, turn_ms, flat = {}, 0, redis.call('HGETALL', key)
  for i = 1, #flat, 2 do
    local held, ends_ms, turn, asks = string.match(flat[i + 1], '^(%d+);(%d+);%d+;(%d+);(.*)$')
    if not held or tonumber(ends_ms) <= now_ms or tonumber(ends_ms) > now_ms + ask.hold_ms then  -- a clock set back
      redis.call('HDEL', key, flat[i])
    elseif flat[i] == ask.process then
      turn_ms = tonumber(turn)
    else
      local process = {name = flat[i], held = tonumber(held), turn_ms = tonumber(turn), asks = {}}
      for priority, requests in string.gmatch(asks, '(-?%d+):(%d+)') do
        process.asks[tonumber(priority)] = tonumber(requests)
      end
      found[#found + 1] = process
    end
  end
  return found, turn_ms
end

-- Gives each process its part of `left` for one priority, the smallest asks first; what is left over is returned. Where
-- there is less than one for each, those have it who have been without the longest.
local function share_out(left, processes, priority)
  local asking = {}
  for _, process in ipairs(processes) do
    if (process.asks[priority] or 0) > 0 then asking[#asking + 1] = process end
  end
  if left < #asking then
    table.sort(asking, function(a, b)
      if a.turn_ms ~= b.turn_ms then return a.turn_ms < b.turn_ms end
      return a.name < b.name
    end)
    for i = 1, left do asking[i].part = asking[i].part + 1 end
    return 0
  end
  table.sort(asking, function(a, b)
    if a.asks[priority] ~= b.asks[priority] then return a.asks[priority] < b.asks[priority] end
    return a.name < b.name
  end)
  for i, process in ipairs(asking) do
    local part = math.min(process.asks[priority], math.floor(left / (#asking - i + 1)))
    process.part = process.part + part
    left = left - part
  end
  return left
end

local function divide(key, pool)
  local processes, turn_ms = read(key)
  local elsewhere = 0
  for _, process in ipairs(processes) do elsewhere = elsewhere + process.held end
  local me = {name = ask.process, turn_ms = turn_ms, asks = {}}
  local asks, wanted = {}, 0
  for i, entry in ipairs(pool.asks) do
    me.asks[entry[1]] = entry[2]
    wanted = wanted + entry[2]
    asks[i] = integer(entry[1]) .. ':' .. integer(entry[2])
  end
  if #asks == 0 and pool.running == 0 then
    redis.call('HDEL', key, ask.process)
    return {0, #processes, 0}
  end
  processes[#processes + 1] = me

  local seen, priorities = {}, {}
  for _, process in ipairs(processes) do
    process.part = 0
    for priority in pairs(process.asks) do
      if not seen[priority] then
        seen[priority] = true
        priorities[#priorities + 1] = priority
      end
    end
  end
  table.sort(priorities)
  local left = pool.capacity
  for _, priority in ipairs(priorities) do left = share_out(left, processes, priority) end
  local part = me.part + (#processes == 1 and math.ceil(left / 2) or math.floor(left / (HEADROOM * #processes)))

  local granted = math.max(0, math.min(part, pool.capacity - elsewhere))
  local held = math.max(granted, pool.running, pool.had)
  if granted > 0 then turn_ms = now_ms end
  local told = {integer(held), integer(now_ms + ask.hold_ms), integer(pool.running), integer(turn_ms), table.concat(asks, ',')}
  redis.call('HSET', key, ask.process, table.concat(told, ';'))
  redis.call('PEXPIRE', key, integer(ask.hold_ms + 1000))
  return {granted, #processes, granted < wanted and 1 or 0}
end

local reply = {}
for i, pool in ipairs(ask.pools) do reply[i] = divide(KEYS[i], pool) end
return reply
