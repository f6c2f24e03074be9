-- One exchange of a gateway process with the shared budgets, as one step: what it gives back, which slots it holds,
-- what it asks for. Called by exchange.py through EVALSHA.
--
-- A window (requests or tokens per minute) is a hash: field "<Redis second>" = amount charged in that second, field
-- "p<Redis second>" = how much of it was taken ahead of need. Units may be spent until 1 s after they were taken, and
-- a bucket counts until its last possible spending is 60 s old: in no 60 s is more admitted than the limit.
-- A day or month of tokens is a hash: field "<number of the period>" = amount charged in it, and "p<Redis second>" as
-- above. A period ends at 00:00 UTC, and with it all that it holds. What was taken ahead counts for the period that it
-- was taken in.
-- Slots in flight are a hash: field "<process>" = "<slots held>:<end in ms>". Nobody renews a dead process's slots.
-- All keys carry the hash tag {poolgate}; all have a TTL. Redis >= 6.2 (effects replication: TIME before writes).
--
-- KEYS: the set of gateway processes, this process's mark, then any limits' keys.
-- ARGV[1]: JSON, all `key` being positions in KEYS:
--   process, number (rises with each exchange), answered (the last number whose reply the process got), alive_ms, slots_ms, processes (at least so many are assumed),
--   gives: [{first (number of the first exchange that carried it), entries: [[key, second, delta, taken-ahead delta]]}]
--   slots: [[key, held]], in place of what Redis knew
--   takes: [{asks: [tokens per waiting request], ahead (requests wanted beyond those), unit (tokens of each of them),
--            slots (wanted beyond those of the asks), limits: [[key, kind, limit]]}]
-- Reply: last number executed before, processes alive, now in ms, then per take:
--   {per ask 1 or 0, requests ahead, slots ahead, slots that may stay idle, 1 if little is left, per limit readings}
--   readings: {used (with all of this take), taken ahead by anybody, newest second, second, amount, second, amount …};
--   the buckets only when an ask was refused. Of a period: {used, taken ahead by anybody, its end}. An exchange that is executed after a later one does nothing; its reply has no takes.

local WINDOW_S = 60
local KEEP_S = WINDOW_S + 1  -- a bucket counts for so many seconds after its own
local AHEAD_S = 2            -- what was taken ahead so long ago is spent or given back
local TTL_S = KEEP_S + 2
local MARK_S = 3660          -- give-backs are repeated for an hour (holdings.py): for so long it is known what was done
local DAY_S = 86400
local PART = 4               -- at most 1/PART of what is left may lie idle with all processes together

local clock = redis.call('TIME')
local second = tonumber(clock[1])
local now_ms = second * 1000 + math.floor(tonumber(clock[2]) / 1000)
local ask = cjson.decode(ARGV[1])

-- Days from 1970-01-01 to the first of a month (1 to 12) of the Gregorian calendar.
local DAYS_BEFORE = {0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334}
local function first_day(year, month)
  local past = month > 2 and year or year - 1  -- the last year whose 29 February is over, if it had one
  local leap_days = math.floor(past / 4) - math.floor(past / 100) + math.floor(past / 400) - 477  -- 477 before 1970
  return 365 * (year - 1970) + leap_days + DAYS_BEFORE[month]
end

-- The calendar day and month of now, in UTC: begins <= second < ends.
local function current_day()
  local number = math.floor(second / DAY_S)
  return {number = number, begins = number * DAY_S, ends = (number + 1) * DAY_S}
end

local function current_month()
  local today = math.floor(second / DAY_S)
  local year, month = 1970 + math.floor(today / 365), 12  -- or a year before
  if first_day(year, 1) > today then year = year - 1 end
  while first_day(year, month) > today do month = month - 1 end
  local number = 12 * year + month - 1
  local after = first_day(math.floor((number + 1) / 12), (number + 1) % 12 + 1)
  return {number = number, begins = first_day(year, month) * DAY_S, ends = after * DAY_S}
end

local PERIODS = {tokens_per_day = current_day(), tokens_per_month = current_month()}
local IS_TOKENS = {tokens_per_min = true, tokens_per_day = true, tokens_per_month = true}

local function integer(number)
  return string.format('%.0f', number)  -- tostring() would write 1e+15
end

-- 1. Too late? And did the process get the answer to what was executed last? The mark: {number, what it took}.
local mark = cjson.decode(redis.call('GET', KEYS[2]) or '[0,[]]')
local last, unanswered = mark[1], mark[1] > ask.answered and mark[2] or {}
if last >= ask.number then return {last, 0, now_ms} end
local taken = {}  -- {key, second, amount, taken ahead}; amounts as text, since cjson writes but 14 digits
local function remember() redis.call('SET', KEYS[2], cjson.encode({ask.number, taken}), 'EX', MARK_S) end
remember()

-- 2. Who is alive
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', integer(now_ms))
redis.call('ZADD', KEYS[1], integer(now_ms + ask.alive_ms), ask.process)
redis.call('PEXPIRE', KEYS[1], integer(ask.alive_ms + 1000))
local alive = redis.call('ZCARD', KEYS[1])
local sharing = math.max(alive, ask.processes)

-- What this script has read and changed, by key.
local windows, slots = {}, {}

-- Forgets the buckets that count no more, also those that a clock which was set back has left in the future.
-- A period is a window with one bucket. Key: {poolgate}:<kind>:<scope>, as limits.py has it.
local function window(key)
  local known = windows[key]
  if known then return known end
  local period = PERIODS[string.match(key, '^{poolgate}:([%l_]+):')]
  local begins, newest = second - KEEP_S, second + WINDOW_S
  if period then begins, newest = period.begins, period.ends - 1 end
  known = {buckets = {}, used = 0, ahead = 0, period = period, begins = begins, newest = newest}
  local flat = redis.call('HGETALL', key)
  for i = 1, #flat, 2 do
    local field, amount = flat[i], tonumber(flat[i + 1])
    local is_ahead = string.sub(field, 1, 1) == 'p'
    local bucket = tonumber(is_ahead and string.sub(field, 2) or field)
    local counts = bucket >= begins and bucket <= newest
    if is_ahead then counts = counts and bucket >= second - AHEAD_S
    elseif period then counts = bucket == period.number end
    if not counts or amount <= 0 then
      redis.call('HDEL', key, field)
    elseif is_ahead then
      known.ahead = known.ahead + amount
    else
      known.buckets[bucket] = amount
      known.used = known.used + amount
    end
  end
  windows[key] = known
  return known
end

-- `at_second`: when it was taken, within the window.
local function charge(key, at_second, amount, ahead)
  local at = window(key)
  local bucket = at.period and at.period.number or at_second
  local charged = at.buckets[bucket] or 0
  amount = math.max(amount, -charged)
  if amount ~= 0 then
    redis.call('HINCRBY', key, integer(bucket), integer(amount))
    at.buckets[bucket] = charged + amount
    at.used = at.used + amount
    at.is_touched = true
  end
  if ahead ~= 0 and at_second >= second - AHEAD_S then
    if tonumber(redis.call('HINCRBY', key, 'p' .. integer(at_second), integer(ahead))) <= 0 then
      redis.call('HDEL', key, 'p' .. integer(at_second))
    end
    at.ahead = math.max(0, at.ahead + ahead)
    at.is_touched = true
  end
end

-- {held by all, held by this process}
local function slots_of(key)
  local known = slots[key]
  if known then return known end
  known = {all = 0, mine = 0}
  local flat = redis.call('HGETALL', key)
  for i = 1, #flat, 2 do
    local held, ends_ms = string.match(flat[i + 1], '^(%d+):(%d+)$')
    if tonumber(ends_ms) <= now_ms or tonumber(ends_ms) > now_ms + ask.slots_ms then  -- a clock that was set back
      redis.call('HDEL', key, flat[i])
    else
      known.all = known.all + tonumber(held)
      if flat[i] == ask.process then known.mine = tonumber(held) end
    end
  end
  slots[key] = known
  return known
end

local function hold(key, held)
  local at = slots_of(key)
  at.all, at.mine, at.is_touched = at.all + held - at.mine, held, true
end

local function give_back(key, at_second, delta, ahead)
  local at = window(key)
  local is_known = at.buckets[at.period and at.period.number or at_second]
  if at_second >= at.begins and at_second <= at.newest and (delta > 0 or is_known) then
    charge(key, at_second, delta, ahead)
  end
end

-- 3. What comes back: first what was taken for requests that were then decided without Redis, since its answer was lost
-- (those keys are in the same cluster slot as KEYS), then what the process says. A bucket that has left its window, or a period that has ended, is no longer counted: nothing to
-- correct. A refund finds a store that has lost its data: nothing to refund.
for _, entry in ipairs(unanswered) do give_back(entry[1], entry[2], -tonumber(entry[3]), -tonumber(entry[4])) end
for _, give in ipairs(ask.gives) do
  if last < give.first then
    for _, entry in ipairs(give.entries) do
      give_back(KEYS[entry[1]], entry[2], entry[3], entry[4])
    end
  end
end
for _, entry in ipairs(ask.slots) do hold(KEYS[entry[1]], entry[2]) end

local function used_of(limit)
  if limit[2] == 'in_flight' then return slots_of(KEYS[limit[1]]).all end
  return window(KEYS[limit[1]]).used
end

-- How much of a limit, of which `free` is left, may lie idle with the asking process.
local function idle_share(limit, free)
  if sharing == 1 then return limit[2] == 'in_flight' and limit[3] or math.floor(free / 2) end
  local share = math.floor(free / (PART * sharing))
  if limit[2] == 'in_flight' then return share end
  local ahead = window(KEYS[limit[1]]).ahead
  return math.max(0, math.min(share, math.floor((free + ahead) / PART) - ahead))
end

-- 4. What is asked for: each waiting request that still fits passes through all of its limits, or through none.
local function take(wish)
  local verdicts, count, tokens, all_pass = {}, 0, 0, true
  local used = {}
  local function need(limit, asked) return IS_TOKENS[limit[2]] and asked or 1 end
  for i, limit in ipairs(wish.limits) do used[i] = used_of(limit) end
  for a, asked in ipairs(wish.asks) do
    local passes = true
    for i, limit in ipairs(wish.limits) do passes = passes and used[i] + need(limit, asked) <= limit[3] end
    if passes then
      count, tokens = count + 1, tokens + asked
      for i, limit in ipairs(wish.limits) do used[i] = used[i] + need(limit, asked) end
    end
    all_pass = all_pass and passes
    verdicts[a] = passes and 1 or 0
  end

  local ahead, idle, is_scarce, slots_ahead = wish.ahead, nil, 0, wish.slots
  for i, limit in ipairs(wish.limits) do
    local free = math.max(0, limit[3] - used[i])
    local share = idle_share(limit, free)
    if limit[2] == 'in_flight' then
      idle = math.min(idle or share, share)
      slots_ahead = math.min(slots_ahead, share, free)
      if share < 1 then ahead, is_scarce = 0, 1 end
    else
      share = IS_TOKENS[limit[2]] and math.floor(share / wish.unit) or share
      if share < 1 then is_scarce = 1 end
      ahead = math.min(ahead, share)
    end
  end
  if not idle or is_scarce == 1 or not all_pass then idle = 0 end
  if not all_pass then ahead = 0 end
  slots_ahead = math.min(slots_ahead, idle)

  local readings = {}
  for i, limit in ipairs(wish.limits) do
    local key = KEYS[limit[1]]
    if limit[2] == 'in_flight' then
      if count + slots_ahead > 0 then hold(key, slots_of(key).mine + count + slots_ahead) end
      readings[i] = {slots_of(key).all, 0, 0}
    else
      local is_tokens = IS_TOKENS[limit[2]]
      local extra = ahead * (is_tokens and wish.unit or 1)
      local amount = (is_tokens and tokens or count) + extra
      charge(key, second, amount, extra)
      if amount > 0 then taken[#taken + 1] = {key, second, integer(amount), integer(extra)} end
      local at = window(key)
      local reading = {at.used, at.ahead, at.period and at.period.ends or 0}
      for bucket, amount in pairs(at.buckets) do
        if amount > 0 and not at.period then
          reading[3] = math.max(reading[3], bucket)
          if not all_pass then
            reading[#reading + 1] = bucket
            reading[#reading + 1] = amount
          end
        end
      end
      readings[i] = reading
    end
  end
  return {verdicts, ahead, slots_ahead, idle, is_scarce, readings}
end

local reply = {last, alive, now_ms}
for _, wish in ipairs(ask.takes) do reply[#reply + 1] = take(wish) end

if #taken > 0 then remember() end

-- 5. What was changed lives on; slots that are held are written once.
for key, at in pairs(windows) do
  if at.is_touched then redis.call('EXPIRE', key, at.period and at.period.ends - second + TTL_S or TTL_S) end
end
for key, at in pairs(slots) do
  if at.is_touched then
    if at.mine > 0 then
      redis.call('HSET', key, ask.process, integer(at.mine) .. ':' .. integer(now_ms + ask.slots_ms))
      redis.call('PEXPIRE', key, integer(ask.slots_ms + 1000))
    else
      redis.call('HDEL', key, ask.process)
    end
  end
end
return reply
