-- Workers look once a round whether anything was taken back from the lost, to call that before what they hold.
CREATE INDEX deferrals_reclaimed ON penstock.deferrals (pool) WHERE reason = 'reclaimed' AND NOT suspect AND NOT held;
